"""Starts an engine, in a process of its own or on a thread, and hands out the front end's end of its channel.

Torch-free until an engine is really started on a thread: the API process imports this. And soon imported: nothing but
what it takes to start a process, since commands start theirs before they import what they are to do with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from firsttoken.core.clock import now_ns
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError
from firsttoken.engine.process import FRONT_END_SIGNALS
from firsttoken.engine.start_account import StartAccount
from firsttoken.observability.logging import logging_setup
from firsttoken.transport.channel import ChannelClosed, ClientEnd
from firsttoken.transport.messages import Shutdown
from firsttoken.transport.process_end import end_words
from firsttoken.transport.socket_channel import SocketClientEnd

if TYPE_CHECKING:
    from firsttoken.transport.inprocess import InProcessEngineEnd

log = logging.getLogger(__name__)

# Read by the libraries under torch when they are loaded; a value that the user chose is kept.
COMPUTE_ENVIRONMENT = {
    # How long OpenMP's threads spin at a barrier before they sleep, in loops of a few ns. A step has about a thousand
    # barriers: at once asleep they take it twice as long, and without end they take the cores from other programs.
    "GOMP_SPINCOUNT": "20000",
    # oneDNN keeps the code that it makes for each shape, 1,024 of them by default, and batches and contexts have no end
    # of shapes: 400 MiB more after 240 requests of random lengths. This many serve a step several times over.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    # Kernels of CUDA's libraries are loaded when they are first used: torch would say so too, but after the driver has
    # been asked for a context.
    "CUDA_MODULE_LOADING": "LAZY",
}

# What an engine gets to leave by itself that a command gives up: it starts and does not listen, or has ended already.
_GIVEN_UP_S = 0.1


class ProcessHandle:
    """An engine in a child process, which was asked for at ``launched_ns``."""

    def __init__(self, process: subprocess.Popen[bytes], client: SocketClientEnd, launched_ns: int) -> None:
        self.process = process
        self.client: ClientEnd = client
        self.pid: int | None = process.pid
        self.launched_ns = launched_ns

    def alive(self) -> bool:
        return self.process.poll() is None

    def how_it_ended(self) -> str:
        return end_words(self.process.poll())

    def stop(self, timeout_s: float) -> None:
        with contextlib.suppress(ChannelClosed):
            self.client.send(Shutdown())
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.log(_level(timeout_s), "the engine process did not leave within %.1f s: killing it", timeout_s)
            self.process.kill()
            self.process.wait()
        self.client.close()


class ThreadHandle:
    """An engine on a thread of this process."""

    def __init__(self, thread: threading.Thread, client: ClientEnd) -> None:
        self.thread = thread
        self.client = client
        self.pid: int | None = None

    def alive(self) -> bool:
        return self.thread.is_alive()

    def how_it_ended(self) -> str:
        return ""

    def stop(self, timeout_s: float) -> None:
        with contextlib.suppress(ChannelClosed):
            self.client.send(Shutdown())
        self.thread.join(timeout_s)
        if self.thread.is_alive():
            log.log(
                _level(timeout_s), "the engine thread did not leave within %.1f s: it ends with its step", timeout_s
            )
        self.client.close()


def _level(timeout_s: float) -> int:
    """Who gives an engine less than a second knows that it cannot hear (it is starting): that is no news."""
    return logging.WARNING if timeout_s >= 1 else logging.DEBUG


def _check_types(args: EngineArgs) -> None:
    """A struct takes what it is given; a wrong type would come to light deep in the engine."""
    try:
        msgspec.convert(msgspec.structs.asdict(args), EngineArgs)
    except msgspec.ValidationError as error:
        raise ConfigError(f"engine options: {error}") from None


def start_process(args: EngineArgs) -> ProcessHandle:
    """Start the engine in a child process over a socket pair that only the two of them hold.

    It logs on this process's stderr, at the same level and in the same format. Raises `ConfigError` for an option of a
    wrong type.
    """
    _check_types(args)
    _fill_standard_descriptors()
    level, as_json = logging_setup()
    launched_ns = now_ns()
    ours, theirs = socket.socketpair()
    with theirs:
        command = [
            sys.executable,
            "-P",  # else a file of the working directory that is called as a module would be taken for it
            "-m",
            "firsttoken.engine.process",
            str(theirs.fileno()),
            str(launched_ns),
            level,
            "json" if as_json else "text",
            msgspec.json.encode(args).decode(),
        ]
        with _signals_held():
            process = subprocess.Popen(  # noqa: S603
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=COMPUTE_ENVIRONMENT | os.environ
            )
    return ProcessHandle(process, SocketClientEnd(ours), launched_ns)


def _fill_standard_descriptors() -> None:
    """Give those of stdin, stdout and stderr that are closed to the null device. A socket would take their number
    next, and what the engine and its libraries print would go into the channel."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """A Ctrl-C, or another signal that is sent to the whole group, waits, and so does a process that is started
    meanwhile begin: the engine's own interpreter is not interrupted before it has said that it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FRONT_END_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def engine_process(args: EngineArgs) -> Iterator[ProcessHandle]:
    """`start_process` for a command, before it imports what it will do with the engine, and the end of the process
    should the command fail in between or forget it.

    For the main thread. Until the command handles SIGTERM itself, that raises ``SystemExit``: the default would end
    the command alone, and the engine only when it notices.
    """
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        handle = start_process(args)
        try:
            yield handle
        finally:
            handle.stop(_GIVEN_UP_S)
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def start_thread(args: EngineArgs) -> ThreadHandle:
    """Start the engine on a daemon thread of this process. Raises `ConfigError` for an option of a wrong type."""
    _check_types(args)
    if "torch" not in sys.modules:
        for name, value in COMPUTE_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    from firsttoken.transport.inprocess import in_process_channel

    account = StartAccount()
    engine_end, client_end = in_process_channel()
    thread = threading.Thread(target=_run, args=(args, engine_end, account), name="firsttoken-engine", daemon=True)
    thread.start()
    return ThreadHandle(thread, client_end)


def _run(args: EngineArgs, channel: InProcessEngineEnd, account: StartAccount) -> None:
    from firsttoken.engine.run import run_engine

    account.close("imports")
    run_engine(args, channel, account, own_process=False)
