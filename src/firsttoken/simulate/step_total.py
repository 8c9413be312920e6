"""Steps of a fixed number of token rows: what engines do whose operator has set a token budget."""

from __future__ import annotations

import msgspec

from firsttoken.core.errors import ConfigError
from firsttoken.core.step_sizes import next_size
from firsttoken.scheduler import Budget, StepLoad, TokenCap


class StepTotal(msgspec.Struct, frozen=True):
    """Decode rows, padded to the next of ``row_profiles``, and prompt tokens together fill a step of ``total`` token
    rows; prompts get at least half."""

    total: int
    row_profiles: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.total < 1:
            raise ConfigError(f"a step must have 1 token row or more, got {self.total!r}")

    def prefill_tokens(self, load: StepLoad, waiting: int, gap_ms: float | None = None) -> int:
        if not load.decode_rows:
            return self.total
        return max(self.total - next_size(self.row_profiles, load.decode_rows), self.total // 2)

    @property
    def most(self) -> int:
        return self.total

    def limited(self, alone: int | None, mixed: int | None) -> Budget:
        if mixed is not None:
            return TokenCap(self.total if alone is None else alone, mixed)
        return self if alone is None else msgspec.structs.replace(self, total=alone)
