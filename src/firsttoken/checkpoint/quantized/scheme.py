"""How the linears of a checkpoint are stored, by name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec

Format = Literal["int4", "int8", "fp8"]
# Which tensors a linear has: `quantized.tensors` lists them.
Layout = Literal["words", "plain", "gptq", "gptq_v2", "awq"]
BITS: dict[Format, int] = {"int4": 4, "int8": 8, "fp8": 8}
FORMATS = tuple(BITS)
REGEX = "re:"
CLASS = "Linear"


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


class SchemeGroup(msgspec.Struct, frozen=True):
    """``targets`` name linears: in full, by a pattern behind "re:" that their name begins with, or all as "Linear"."""

    targets: tuple[str, ...]
    scheme: LinearScheme


class QuantScheme(msgspec.Struct, frozen=True, kw_only=True):
    """``method`` as ``config.json`` calls it. A linear that ``ignore`` names as targets do is stored in full."""

    method: str
    groups: tuple[SchemeGroup, ...]
    ignore: tuple[str, ...] = ()

    def of(self, tensor: str) -> LinearScheme | None:
        """How the linear of a weight (``model.layers.0.mlp.up_proj.weight``) is stored; None: in full."""
        module = tensor.removesuffix(".weight")
        if not is_linear(module) or any(_rank(target, module) is not None for target in self.ignore):
            return None
        # The most specific target decides, as for the writers of such files.
        found = [
            (rank, index)
            for index, group in enumerate(self.groups)
            for target in group.targets
            if (rank := _rank(target, module)) is not None
        ]
        return self.groups[min(found)[1]].scheme if found else None

    def main_format(self, tensors: Iterable[str]) -> Format | None:
        """The format of most of them; None where all are stored in full."""
        formats = Counter(scheme.format for name in tensors if (scheme := self.of(name)) is not None)
        return formats.most_common(1)[0][0] if formats else None

    def __str__(self) -> str:
        return f"{self.method}: " + ", ".join(dict.fromkeys(str(group.scheme) for group in self.groups))


def is_linear(module: str) -> bool:
    return module == "lm_head" or module.endswith("_proj")


def _rank(target: str, module: str) -> int | None:
    """How specific a target is that names the linear, 0 most; None: it does not."""
    if target.startswith(REGEX):
        return 1 if re.match(target.removeprefix(REGEX), module) else None
    if target == module:
        return 0
    return 2 if target == CLASS else None
