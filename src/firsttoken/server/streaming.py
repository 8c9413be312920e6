"""What the streaming answers of chat and completions share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from firsttoken.core.errors import InvalidRequest
from firsttoken.server.errors import bad_request, unavailable
from firsttoken.server.refusals import refuse_unimplemented, refused_fields
from firsttoken.server.schema import GenerationRequest, StreamOptions

if TYPE_CHECKING:
    from firsttoken.frontend.flow import Source, Tell
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


def source(generation: Generation, tell: Tell, *, prompt_field: str, grammar_field: str | None = None) -> Source:
    """For `frontend.flow`: a refusal that arrives late names the caller's fields."""

    def renamed(error: InvalidRequest) -> InvalidRequest:
        if error.param == "grammar" and grammar_field is not None:
            return InvalidRequest(error.message, param=grammar_field, code=error.code)
        return named(error, prompt_field)

    return generation, tell, renamed


def check_whole(last: Delta) -> None:
    """Of an answer's last delta. Raises `ApiError` where the server itself ended it: that is no short answer."""
    if last.finish_reason == "abort":
        raise unavailable("The server ended the request before it was complete.", "request_aborted", "aborted")


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
