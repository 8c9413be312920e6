"""Where the answers of ``firsttoken chat`` come from: an engine of its own, or a server's URL."""

from __future__ import annotations

import asyncio
import http.client
import json
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

from firsttoken.cli.jobs import Job
from firsttoken.cli.opener import moved, opener, running_or_tls, untrusted
from firsttoken.core.address import how_to_write, is_without_tls, without_tls
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError, FirstTokenError

if TYPE_CHECKING:
    from firsttoken.frontend.async_llm import AsyncLLM
    from firsttoken.transport.channel import EngineHandle

T = TypeVar("T")
Message = dict[str, str]


class AnswerFailed(FirstTokenError):
    """The server would not answer; the message is its own."""


class Source(Protocol):
    """Streams answers. ``completion_tokens`` is the last answer's number of tokens, None if unknown."""

    model: str
    completion_tokens: int | None

    def stream(self, messages: list[Message]) -> Iterator[str]:
        """Text as it comes. Closing the iterator ends the request at once."""

    def close(self) -> None: ...


class LocalSource:
    """The engine that ``handle`` was started as, for ``args``. Its front end's event loop runs on a thread, so that the
    terminal may block."""

    def __init__(self, args: EngineArgs, fields: dict[str, Any], handle: EngineHandle) -> None:
        from firsttoken.frontend.async_llm import AsyncLLM

        self._fields = fields
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chat-loop", daemon=True)
        self._thread.start()
        self.completion_tokens: int | None = None
        self._llm: AsyncLLM | None = None
        try:
            self._llm = self._call(AsyncLLM.launch(args, handle=handle))
        except BaseException:
            self.close()
            raise
        self.model = self._llm.model_name

    def stream(self, messages: list[Message]) -> Iterator[str]:
        return self.answer(Job(messages=list(messages)))

    def answer(self, job: Job) -> Iterator[str]:
        """`stream`, for any prompt; what the engine refuses is raised as `InvalidRequest`."""
        pieces: queue.SimpleQueue[str | Exception | None] = queue.SimpleQueue()
        task = asyncio.run_coroutine_threadsafe(self._produce(job, pieces), self._loop)
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
            task.cancel()

    async def _produce(self, job: Job, pieces: queue.SimpleQueue[str | Exception | None]) -> None:
        from firsttoken.cli.batch import prompt_ids, sampling

        llm = self._llm
        assert llm is not None
        try:
            ids = await prompt_ids(llm, job)
            params = sampling(llm.generation_config, self._fields, job.fields)
            generation = llm.open(ids, params, terms=job.terms)
            try:
                async for delta in generation:
                    pieces.put(delta.text)
            finally:
                generation.cancel()
                self.completion_tokens = generation.completion_tokens
            pieces.put(None)
        except Exception as error:  # handed to the thread that waits, which raises it
            pieces.put(error)

    def close(self) -> None:
        if self._llm is not None:
            llm, self._llm = self._llm, None
            self._call(llm.shutdown())
        self._call(_end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _end_tasks() -> None:
    """What a launch that was given up has left on the loop ends before the loop does."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class RemoteSource:
    """Any OpenAI-compatible server, by its base URL (with or without ``/v1``). With https the certificates of
    ``ca_file`` are trusted alone, with None the system's."""

    TIMEOUT_S = 600.0

    def __init__(
        self,
        url: str,
        fields: dict[str, Any],
        *,
        api_key: str | None = None,
        model: str | None = None,
        ca_file: str | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            hint = how_to_write(url, "http://127.0.0.1:8000")
            raise ConfigError(f"--url {url!r} is not a server's address: {hint}")
        self._base = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._fields = fields
        self.completion_tokens: int | None = None
        self._opener = opener(ca_file)
        self.model = model or self._first_model()

    def stream(self, messages: list[Message]) -> Iterator[str]:
        self.completion_tokens = None
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields,
        }
        with self._open("/v1/chat/completions", json.dumps(body).encode()) as reply:
            for event in self._events(reply):
                if "error" in event:
                    raise AnswerFailed(_error_text(event, "the server ended the stream with an error"))
                usage = event.get("usage")
                if usage:
                    self.completion_tokens = usage.get("completion_tokens")
                for choice in event.get("choices", ()):
                    yield choice.get("delta", {}).get("content") or ""

    def close(self) -> None:
        """Nothing stays open between answers."""

    def _first_model(self) -> str:
        with self._open("/v1/models", None) as reply:
            try:
                return str(json.load(reply)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise AnswerFailed(f"{self._base}/v1/models names no model: give MODEL") from None

    def _open(self, path: str, body: bytes | None) -> http.client.HTTPResponse:
        request = urllib.request.Request(self._base + path, data=body, headers=self._headers)  # noqa: S310  # checked
        try:
            reply: http.client.HTTPResponse = self._opener.open(request, timeout=self.TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                if (elsewhere := moved(self._base, error)) is not None:
                    raise AnswerFailed(elsewhere) from None
                told = _error_text(_as_object(error.read(1 << 20)), f"HTTP {error.code}")
                advice = "; give the right key with --api-key" if error.code == HTTPStatus.UNAUTHORIZED else ""
                raise AnswerFailed(told + advice) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if is_without_tls(reason):
                raise AnswerFailed(f"cannot reach {self._base}: {without_tls(self._base)}") from None
            if advice := untrusted(reason):
                raise AnswerFailed(f"cannot reach {self._base}: {reason}{advice}") from None
            raise AnswerFailed(f"cannot reach {self._base}: {reason}; {running_or_tls(self._base, reason)}") from None
        return reply

    def _events(self, reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        try:
            for line in reply:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield _as_object(data)
        except (OSError, http.client.HTTPException) as error:
            raise AnswerFailed(f"the connection to {self._base} broke: {error}") from None
        raise AnswerFailed(f"{self._base} ended the stream before [DONE]")


def _as_object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _error_text(body: dict[str, Any], fallback: str) -> str:
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return f"{fallback}: {message}" if message else fallback
