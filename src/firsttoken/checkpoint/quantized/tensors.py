"""The tensors of a quantized folder: each rounded linear as one, with its parts checked before any is multiplied."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from firsttoken.checkpoint.checkpoint import Bytes, TensorInfo, TensorSource
from firsttoken.checkpoint.quantized.compressed import REGROUP
from firsttoken.checkpoint.quantized.scheme import BITS, Layout, LinearScheme, QuantScheme
from firsttoken.core.errors import CheckpointError

Part = tuple[TensorInfo, Bytes]
_FLOATS = frozenset({"F16", "BF16", "F32"})
# By layout: those that must be there, and those that may.
_REQUIRED: dict[Layout, tuple[str, ...]] = {
    "words": ("weight_packed", "weight_scale", "weight_shape"),
    "plain": ("weight", "weight_scale"),
    "gptq": ("qweight", "qzeros", "scales"),
    "gptq_v2": ("qweight", "qzeros", "scales"),
    "awq": ("qweight", "qzeros", "scales"),
}
_OPTIONAL: dict[Layout, tuple[str, ...]] = {
    "words": ("weight_zero_point",),
    "plain": ("weight_zero_point",),
    "gptq": ("g_idx",),
    "gptq_v2": ("g_idx",),
    "awq": (),
}
# Of inputs and results, which are computed in more bits.
_LEFT_ASIDE = frozenset({"input_scale", "input_zero_point"})
_PARTS = frozenset(
    name for table in (_REQUIRED, _OPTIONAL) for parts in table.values() for name in parts if name != "weight"
)
WORD_BITS = 32


class QuantizedTensors:
    """`TensorSource` over a folder's tensors, where ``X.weight`` stands for all tensors of a rounded linear X.

    Raises `CheckpointError` naming the tensor that is missing, left over or misshapen; `parts` reads what must hold of
    the numbers themselves. ``expected`` names the model's tensors: GPTQ's writers used to give every linear a bias, of
    zeros where the model has none.
    """

    def __init__(self, files: TensorSource, scheme: QuantScheme, path: str, expected: Collection[str]) -> None:
        self._files = files
        self._path = path
        self._expected = expected
        stored = files.infos()
        modules = {name.rpartition(".")[0] for name in stored if name.rpartition(".")[2] in _PARTS | {"weight"}}
        self._schemes = {module: found for module, found in scheme.linears.items() if module in modules}
        self._infos = {name: info for name, info in stored.items() if not self._is_part(name)}
        for module, found in self._schemes.items():
            shape = self._shape(module, found)
            size = sum(self._info(f"{module}.{part}").nbytes for part in self._names(module, found.layout))
            name = f"{module}.weight"
            self._infos[name] = TensorInfo(name, shape, found.format.upper(), size, found)

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def data(self, name: str) -> Bytes:
        """See `TensorSource.data`; a rounded linear has `parts` instead."""
        if self._infos[name].rounded is not None:
            raise self._fail(name, "is stored as several tensors")
        return self._files.data(name)

    def parts(self, name: str) -> dict[str, Part]:
        """The tensors of a rounded linear's ``weight`` by their names behind the linear's own."""
        module = name.removesuffix(".weight")
        found = self._schemes[module]
        parts = {
            part: (self._info(f"{module}.{part}"), self._files.data(f"{module}.{part}"))
            for part in self._names(module, found.layout)
        }
        self._check(module, found, parts)
        return {part: value for part, value in parts.items() if part not in ("weight_shape", "g_idx")}

    # ------------------------------------------------------------------ which tensors there are

    def _is_part(self, name: str) -> bool:
        """Of a rounded linear; what looks like one of a linear that is stored in full is refused."""
        module, _, part = name.rpartition(".")
        found = self._schemes.get(module)
        if found is None:
            if part in _PARTS:
                known = f"{module}.weight" in self._expected
                why = "quantization_config leaves it in full" if known else "the model has no such linear"
                raise self._fail(name, f"is part of a quantized linear, but {why}")
            return False
        if part == "bias":
            needless = found.layout.startswith("gptq") and name not in self._expected
            return needless and not self._files.data(name).any()
        if part in _REQUIRED[found.layout] or part in _OPTIONAL[found.layout] or part in _LEFT_ASIDE:
            return True
        what = "is stored in full" if part == "weight" else "is no part of such a linear"
        raise self._fail(name, f"{what}, but quantization_config says {found} ({found.layout})")

    def _names(self, module: str, layout: Layout) -> list[str]:
        stored = self._files.infos()
        for part in _REQUIRED[layout]:
            if f"{module}.{part}" not in stored:
                raise self._fail(f"{module}.{part}", "is missing, which the linear cannot be read without")
        return [*_REQUIRED[layout], *(part for part in _OPTIONAL[layout] if f"{module}.{part}" in stored)]

    def _info(self, name: str) -> TensorInfo:
        return self._files.infos()[name]

    # ------------------------------------------------------------------ shapes

    def _shape(self, module: str, found: LinearScheme) -> tuple[int, int]:
        """``[N, K]``, when all parts fit it."""
        names = self._names(module, found.layout)
        each = WORD_BITS // BITS[found.format]
        weight = self._info(f"{module}.{names[0]}")
        if len(weight.shape) != 2:
            raise self._fail(weight.name, f"has shape {list(weight.shape)}, a matrix has two dimensions")
        rows, columns = weight.shape
        if found.layout == "plain":
            self._expect_type(weight, "F8_E4M3" if found.format == "fp8" else "I8")
            n, k = rows, columns
        else:
            self._expect_type(weight, "I32")
            down = found.layout.startswith("gptq")
            n, k = (columns, rows * each) if down else (rows, columns * each)
            if found.layout == "awq":
                n, k = columns * each, rows
        if found.group and k % found.group:
            raise self._fail(weight.name, f"has {k} columns, which groups of {found.group} do not divide")
        self._check_scales(module, found, n, k, each)
        return n, k

    def _check_scales(self, module: str, found: LinearScheme, n: int, k: int, each: int) -> None:
        groups = k // found.group if found.group else 1
        names = self._names(module, found.layout)
        if found.layout in ("words", "plain"):
            shapes: list[tuple[int, ...]] = [(n, groups)]
            if not found.group:
                shapes += [(n,), (1, 1), (1,), ()]
            scales = self._expect(f"{module}.weight_scale", shapes, _FLOATS)
            if "weight_zero_point" in names:
                name = f"{module}.weight_zero_point"
                if found.layout == "words" and self._info(name).type == "I32":
                    self._expect(name, [(-(-n // each), groups)], {"I32"})
                else:
                    self._expect(name, [scales.shape], {"I8"})
            elif found.zeros:
                raise self._fail(f"{module}.weight_zero_point", "is missing, but quantization_config says asymmetric")
            return
        self._expect(f"{module}.scales", [(groups, n)], _FLOATS)
        self._expect(f"{module}.qzeros", [(groups, n // each)], {"I32"})
        if "g_idx" in names:
            self._expect(f"{module}.g_idx", [(k,)], {"I32"})

    def _expect(self, name: str, shapes: list[tuple[int, ...]], types: frozenset[str] | set[str]) -> TensorInfo:
        info = self._info(name)
        if tuple(info.shape) not in shapes:
            known = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise self._fail(name, f"has shape {list(info.shape)}, the weight's gives {known}")
        self._expect_type(info, *sorted(types))
        return info

    def _expect_type(self, info: TensorInfo, *types: str) -> None:
        if info.type not in types:
            raise self._fail(info.name, f"is stored as {info.type}, expected {' or '.join(types)}")

    # ------------------------------------------------------------------ numbers

    def _check(self, module: str, found: LinearScheme, parts: Mapping[str, Part]) -> None:
        """What small tensors say must be what was read from the others' shapes."""
        shape = self._infos[f"{module}.weight"].shape
        if "weight_shape" in parts:
            said = numbers(parts["weight_shape"], "I64").tolist()
            if said != list(shape):
                raise self._fail(f"{module}.weight_shape", f"says {said}, but the weight has shape {list(shape)}")
        if "g_idx" in parts:
            ordered = np.arange(shape[1]) // (found.group or shape[1])
            if not np.array_equal(numbers(parts["g_idx"], "I32"), ordered):
                raise self._fail(
                    f"{module}.g_idx", f"does not number groups of {found.group} columns in turn: {REGROUP}"
                )
        if found.layout.startswith("gptq"):
            self._check_gptq_zeros(module, found, parts)
        elif "weight_zero_point" in parts and not found.zeros:
            self._check_symmetric(f"{module}.weight_zero_point", parts["weight_zero_point"], BITS[found.format])

    def _check_gptq_zeros(self, module: str, found: LinearScheme, parts: Mapping[str, Part]) -> None:
        bits, raw = BITS[found.format], parts["qzeros"][1].reshape(-1)
        stored = np.stack((raw & 15, raw >> 4)) if bits == 4 else raw
        first = 1 if found.layout == "gptq" else 0
        if first and bool((stored == (1 << bits) - 1).any()):
            raise self._fail(
                f"{module}.qzeros",
                f"holds a zero point of {1 << bits}, beyond the values of {bits} bits: the file is damaged, or was "
                "written as checkpoint_format 'gptq' with a zero point of 0, which that cannot hold",
            )
        if not found.zeros and bool((stored != (1 << (bits - 1)) - first).any()):
            raise self._fail(f"{module}.qzeros", "holds zero points, but quantization_config says sym")

    def _check_symmetric(self, name: str, part: Part, bits: int) -> None:
        info, raw = part
        middle = 0
        if info.type == "I32":  # words of values plus half of their range
            middle = 0x88 if bits == 4 else 0x80
        if bool((raw != middle).any()):
            raise self._fail(name, "holds zero points, but quantization_config says symmetric")

    def _fail(self, name: str, message: str) -> CheckpointError:
        return CheckpointError(message, file=self._path, field=name)


def refuse_parts(files: TensorSource, path: str) -> None:
    """Raise `CheckpointError` where a folder whose ``config.json`` says nothing of it holds quantized linears."""
    for name in files.infos():
        if name.rpartition(".")[2] in _PARTS:
            raise CheckpointError(
                "is part of a quantized linear, but config.json has no quantization_config: where another file has it "
                "(quantize_config.json, quant_config.json), put it there with its quant_method",
                file=path,
                field=name,
            )


def numbers(part: Part, type: str) -> NDArray[np.int64]:
    """A small tensor of integers. Raises `CheckpointError` for another type."""
    info, raw = part
    if info.type != type:
        raise CheckpointError(f"is stored as {info.type}, expected {type}", field=info.name)
    kind: str = {"I32": "<i4", "I64": "<i8"}[type]
    out: NDArray[np.int64] = np.frombuffer(raw.tobytes(), kind).astype(np.int64)
    return out
