"""From options to a serving process, and its orderly end.

The first SIGTERM or SIGINT drains: running requests finish, new ones get 503, readiness fails and liveness holds. The
second stops at once: streams get an error event. Uvicorn's own signal handling would cut the streams, so it is off. An
engine that dies is started again (`frontend.keeper`); where that does not help the process ends, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import uvicorn
import uvloop

from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.core.errors import ConfigError
from firsttoken.frontend.restarts import RestartPolicy
from firsttoken.observability.audit_file import check_writable
from firsttoken.observability.logging import logging_setup
from firsttoken.observability.otlp.settings import OtlpSettings, resolve
from firsttoken.server.app import FirstTokenApp, build_app
from firsttoken.server.config import ServerConfig
from firsttoken.server.connections import Connections, make_room
from firsttoken.server.ending import Ending
from firsttoken.server.exporting import exporting
from firsttoken.server.handshake import over_tls
from firsttoken.server.listener import bind, listen
from firsttoken.server.protocol import Protocol as OwnProtocol
from firsttoken.server.start_lines import CHAT, IDS, TEXT, promises, start_lines, start_parts, try_lines
from firsttoken.server.supervisor import Supervisor
from firsttoken.server.tls import curl_trust, server_context
from firsttoken.version import __version__

if TYPE_CHECKING:
    import socket
    import ssl

    from firsttoken.core.engine_args import EngineArgs
    from firsttoken.frontend.async_llm import AsyncLLM
    from firsttoken.text.prompt_templates import PromptTemplate
    from firsttoken.transport.channel import EngineHandle

logger = logging.getLogger(__name__)

# Longer than the usual client's idle time, so that it is the client who closes an idle connection.
KEEP_ALIVE_S = 75
# What connections get to close themselves once all their calls have ended.
CLOSE_S = 2
LAG_EVERY_S = 0.25


def serve(
    config: ServerConfig,
    listener: socket.socket,
    args: EngineArgs,
    handle: EngineHandle,
    began_ns: int,
    prompt_templates: Sequence[PromptTemplate] = (),
) -> int:
    """Serve on ``listener`` (see `listener.bind`) until a signal, with the engine that was started for ``args``; the
    start is counted from ``began_ns``; ``prompt_templates`` is what the file that ``config`` names says. Returns the
    exit code: 0, or 1 when running requests had to be cut off or the engine was lost.

    Raises what `AsyncLLM.launch` raises.
    """
    from firsttoken.frontend.async_llm import AsyncLLM

    def launch() -> Awaitable[AsyncLLM]:
        restarts = restart_policy(config)
        return AsyncLLM.launch(args, handle=handle, prompt_templates=prompt_templates, restarts=restarts)

    return _run(config, listener, launch, began_ns)


def restart_policy(config: ServerConfig) -> RestartPolicy:
    return RestartPolicy(limit=config.engine_restarts, hung_after_s=config.engine_hung_s)


def run_server(config: ServerConfig, launch: Callable[[], Awaitable[AsyncLLM]]) -> int:
    """`serve` for an engine started by ``launch``, which runs after the address is known to be free.

    Raises `ConfigError` when the address cannot be used, and what ``launch`` raises.
    """
    began_ns = now_ns()
    with contextlib.closing(bind(config)) as listener:
        return _run(config, listener, launch, began_ns)


def _run(
    config: ServerConfig, listener: socket.socket, launch: Callable[[], Awaitable[AsyncLLM]], began_ns: int
) -> int:
    for name in config.names_without_rule():
        logger.warning(
            "an API key is given as %.80s=..., but the targets have no rule of that name: the whole text is taken as "
            "the key, and its callers may ask for any class; add a rule to [keys] if it is a name",
            name,
        )
    _check_installed(config)
    # Here and not before the engine is launched: it starts meanwhile, and a mistake is still told before it loads.
    tls = server_context(config)
    if config.audit_log is not None:
        check_writable(config.audit_log)
    otlp = resolve(config.otlp_endpoint, config.otlp_protocol, os.environ)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, listener, launch, began_ns, otlp, tls))


async def _serve(
    config: ServerConfig,
    listener: socket.socket,
    launch: Callable[[], Awaitable[AsyncLLM]],
    began_ns: int,
    otlp: OtlpSettings | None,
    tls: ssl.SSLContext | None,
) -> int:
    llm = await _launched(launch)
    if llm is None:
        return 1
    try:
        async with exporting(otlp, llm):
            return await _serve_until_signal(config, listener, llm, began_ns, tls)
    finally:
        await llm.shutdown()
        # A loop that ends gives signals back to the system, for which this one ends the process.
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


async def _serve_until_signal(
    config: ServerConfig, listener: socket.socket, llm: AsyncLLM, began_ns: int, tls: ssl.SSLContext | None
) -> int:
    make_room(config.max_connections)
    listen(listener, config)
    app = build_app(llm, config)
    server = _http_server(app, config, tls)

    def stop() -> None:
        server.should_exit = True

    supervisor = Supervisor.of(os.environ, os.getpid())
    ending = Ending(llm, app, stop, config.drain_s, supervisor.stopping)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.on_signal)
    loop.add_signal_handler(signal.SIGUSR1, llm.flight.dump, "SIGUSR1")
    if app.reopen_log is not None:
        loop.add_signal_handler(signal.SIGHUP, app.reopen_log)
    llm.flight.watch_collector()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    watching = [
        asyncio.create_task(_watch_loop(llm.metrics.loop_lag, supervisor.alive)),
        asyncio.create_task(ending.watch_engine()),
    ]
    while not (server.started or serving.done()):  # noqa: ASYNC110  # uvicorn offers no event
        await asyncio.sleep(0.001)
    if serving.done():
        await serving  # and hear why
        return 1
    # What was made during the start lives as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    took_ns, trust = now_ns() - began_ns, ""
    if tls is not None and config.ssl_certfile is not None:
        trust = await asyncio.to_thread(curl_trust, tls, config.ssl_certfile, listener.getsockname()[0])
    _tell_start(llm, app, config, listener, took_ns, trust)
    supervisor.ready()
    await serving
    for one in watching:
        one.cancel()
    supervisor.close()
    await asyncio.to_thread(app.close)
    return ending.exit_code


def _once(message: str) -> Callable[[], None]:
    """Says it the first time: a pipe that nobody reads before the server answers would fill, and hold it."""
    left = [message]

    def say() -> None:
        if left:
            logger.warning(left.pop())

    return say


async def _launched(launch: Callable[[], Awaitable[AsyncLLM]]) -> AsyncLLM | None:
    """The started engine; None when SIGTERM came first. (SIGINT is the runner's until then: KeyboardInterrupt.)"""
    loop = asyncio.get_running_loop()
    launching = asyncio.ensure_future(launch())
    loop.add_signal_handler(signal.SIGTERM, launching.cancel)
    loop.add_signal_handler(signal.SIGUSR1, _once("there is nothing to dump before the engine is ready"))
    try:
        return await launching
    except asyncio.CancelledError:
        if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # within a task
            raise
        logger.warning("stopped before it was ready")
        return None
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _watch_loop(observe: Callable[[float], None], alive: Callable[[], None]) -> None:
    """Measure how late the event loop wakes up, in seconds: the first sign of work that does not belong on it; and say
    that it does."""
    while True:
        due = time.monotonic() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        observe(max(time.monotonic() - due, 0.0))
        alive()


class _HTTPServer(Protocol):
    """``should_exit`` set ends it, once those calls have ended that run."""

    started: bool
    should_exit: bool

    async def serve(self, sockets: list[socket.socket]) -> None: ...


def _http_server(app: FirstTokenApp, config: ServerConfig, tls: ssl.SSLContext | None) -> _HTTPServer:
    if config.server == "granian":
        from firsttoken.server.granian_server import GranianServer

        return GranianServer(app, config, KEEP_ALIVE_S)
    limits = Connections(config.max_connections, config.max_connections_per_ip)
    return _Uvicorn(_uvicorn_config(app, tls, limits))


def _check_installed(config: ServerConfig) -> None:
    if config.server == "granian" and importlib.util.find_spec("granian") is None:
        raise ConfigError(
            "the server granian is not installed: pip install 'firsttoken[granian]', or leave --server out"
        )


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _uvicorn_config(
    app: FirstTokenApp, tls: ssl.SSLContext | None = None, connections: Connections | None = None
) -> uvicorn.Config:
    # Not by uvicorn's own options for TLS, which name no file that is at fault, and count nobody before he has spoken.
    protocol = partial(OwnProtocol if tls is None else partial(over_tls, tls), connections=connections)
    config = uvicorn.Config(
        app,
        loop="none",
        http=protocol,  # type: ignore[arg-type]  # it is called, no more
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_S,
    )
    config.load()
    return config


def _tell_start(
    llm: AsyncLLM, app: FirstTokenApp, config: ServerConfig, listener: socket.socket, took_ns: int, trust: str
) -> None:
    """The address, what the start took, and a line to try; one record where logs are for machines."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    info = llm.info
    took = start_parts(took_ns / NS_PER_MS, info.start_ms)
    _, as_json = logging_setup()
    if as_json:
        told: dict[str, object] = {
            "url": url,
            "pid": os.getpid(),
            "version": __version__,
            "served_model": llm.model_name,
        }
        told |= {name: getattr(info, name) for name in ("device", "dtype", "quantization", "kv_dtype", "max_model_len")}
        logger.info("ready", extra=told | {"start_ms": took[1] | {"total": took[0]}})
        return
    if llm.chat_template is not None:
        path, body = "chat/completions", CHAT
    else:
        path, body = "completions", TEXT if llm.tokenizer is not None else IDS
    facts = [
        [
            f"device {info.device}",
            f"dtype {info.dtype}",
            f"quantization {info.quantization}",
            f"context {info.max_model_len} tokens",
        ],
        [f"up to {info.max_num_seqs} requests at once", f"KV {info.kv_blocks} blocks of {info.block_tokens} tokens"],
        [f"process {os.getpid()}"],
    ]
    if (checked := info.self_check) is not None:
        facts.append([f"self-check: {checked.top1_agreement:.1%} the same likeliest token, KL {checked.kl:.4f} nats"])
    if llm.chat_template is not None:
        facts.append(app.formats.lines())
    if told_promises := promises(config.targets):
        facts.append(told_promises)
    lines = start_lines([f"firsttoken {__version__} serves {llm.model_name}", f"on {url}"], facts, took)
    print("\n".join(lines + try_lines(url, path, body, key=bool(config.api_keys), trust=trust)), flush=True)
