"""How the linears of a checkpoint are stored, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec

Format = Literal["int4", "int8", "fp8"]
# Which tensors a linear has: `quantized.tensors` lists them.
Layout = Literal["words", "plain", "gptq", "gptq_v2", "awq"]
BITS: dict[Format, int] = {"int4": 4, "int8": 8, "fp8": 8}
FORMATS = tuple(BITS)


class LinearScheme(msgspec.Struct, frozen=True):
    """One linear: ``group`` columns share a scale (0: a row does, or the whole), ``zeros`` when each has a zero
    point."""

    format: Format
    group: int
    zeros: bool
    layout: Layout

    def __str__(self) -> str:
        shared = f" in groups of {self.group}" if self.group else ""
        return f"{self.format}{shared}{' with zero points' if self.zeros else ''}"


class QuantScheme(msgspec.Struct, frozen=True, kw_only=True):
    """``method`` as ``config.json`` calls it, ``linears`` those that are rounded, by name (``lm_head``,
    ``model.layers.0.mlp.up_proj``). All others are stored in full."""

    method: str
    linears: dict[str, LinearScheme]

    def of(self, tensor: str) -> LinearScheme | None:
        """How the linear of a weight (``model.layers.0.mlp.up_proj.weight``) is stored; None: in full."""
        return self.linears.get(tensor.removesuffix(".weight"))

    def main_format(self, tensors: Iterable[str]) -> Format | None:
        """The format of most of them; None where all are stored in full."""
        formats = Counter(scheme.format for name in tensors if (scheme := self.of(name)) is not None)
        return formats.most_common(1)[0][0] if formats else None

    def __str__(self) -> str:
        return f"{self.method}: " + ", ".join(dict.fromkeys(map(str, self.linears.values())))


def is_linear(module: str) -> bool:
    return module == "lm_head" or module.endswith("_proj")
