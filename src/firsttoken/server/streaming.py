"""What the streaming answers of chat and completions share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from firsttoken.core.errors import InvalidRequest
from firsttoken.server.errors import bad_request, unavailable
from firsttoken.server.refusals import refuse_unimplemented, refused_fields
from firsttoken.server.schema import GenerationRequest, StreamOptions

if TYPE_CHECKING:
    from firsttoken.frontend.generation import Delta, Generation

_REFUSED = refused_fields(StreamOptions)


def check_stream_options(request: GenerationRequest) -> None:
    """Raises `ApiError` 400: options without streaming, or one that we do not implement."""
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    refuse_unimplemented(options, _REFUSED, "stream_options.")


async def deltas(
    generation: Generation, *, prompt_field: str, grammar_field: str | None = None
) -> AsyncIterator[Delta]:
    """The generation's deltas. A refusal that arrives late names the caller's fields, and an answer that the server
    itself ended is an error, not a short answer."""
    try:
        async for delta in generation:
            if delta.finish_reason == "abort":
                raise unavailable("The server ended the request before it was complete.", "request_aborted", "aborted")
            yield delta
    except InvalidRequest as error:
        if error.param == "grammar" and grammar_field is not None:
            raise InvalidRequest(error.message, param=grammar_field, code=error.code) from None
        raise named(error, prompt_field) from None


@contextlib.contextmanager
def naming(prompt_field: str) -> Iterator[None]:
    """What is wrong with "the prompt" inside is said of ``prompt_field``."""
    try:
        yield
    except InvalidRequest as error:
        raise named(error, prompt_field) from None


def named(error: InvalidRequest, prompt_field: str) -> InvalidRequest:
    """The front end speaks of the prompt; a chat caller sent messages, and others several prompts."""
    if error.param != "prompt" or prompt_field == "prompt":
        return error
    message = error.message
    if "[" in prompt_field or message.startswith("prompt: "):
        message = f"{prompt_field}: {message.removeprefix('prompt: ')}"
    return InvalidRequest(message, param=prompt_field, code=error.code)
