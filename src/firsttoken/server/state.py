"""What every route needs, made once per application."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from firsttoken.core.errors import EngineDraining
from firsttoken.server.call import Live
from firsttoken.server.config import MIB, ServerConfig
from firsttoken.server.decode import BATCH_SHARE
from firsttoken.server.errors import ApiError
from firsttoken.server.structured import CheckedGrammars
from firsttoken.text.answer_formats import AnswerFormats

if TYPE_CHECKING:
    from firsttoken.frontend.async_llm import AsyncLLM


@dataclass(frozen=True, slots=True)
class AppState:
    llm: AsyncLLM
    config: ServerConfig
    live: Live
    formats: AnswerFormats
    grammars: CheckedGrammars = field(default_factory=CheckedGrammars)

    @property
    def prompt_limit(self) -> int:
        """Bytes of JSON that one prompt may take."""
        return self.config.max_prompt_bytes(self.llm.info.max_model_len)

    @property
    def body_limit(self) -> int:
        """Bytes of the largest body: with the most prompts that it may have, and as much again as a schema needs."""
        return min(self.config.max_body_bytes, BATCH_SHARE * self.prompt_limit + MIB)

    @property
    def parse_special(self) -> bool:
        """Whether raw prompts have control tokens where their text looks like some."""
        return self.config.raw_control_tokens == "parse"

    def check_open(self) -> None:
        """Turn new requests away before any work is done for them, once the server is draining, and while there is no
        engine."""
        if self.llm.is_draining:
            raise EngineDraining("draining")
        if (error := self.llm.error) is not None:
            raise error

    def check_model(self, name: str | None) -> None:
        """A request may leave the model out; another name than the served one is a 404."""
        if name is not None and name != self.llm.model_name:
            raise model_not_found(name, self.llm.model_name)


def model_not_found(name: str, served: str) -> ApiError:
    shown = name if len(name) <= 200 else name[:200] + "..."
    return ApiError(
        404,
        f"The model {shown!r} does not exist; this server serves {served!r}.",
        param="model",
        code="model_not_found",
    )
