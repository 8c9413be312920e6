"""The tensor instruction m16n8k16 on registers, and what unpacks its operands.

A tensor ``[T, 4]`` here is four registers of each of a program's T threads. The instruction's lane ``4 g + t`` gives
rows g and g + 8 of W and row g of x, at the four columns that are the lane's (`layout`), and gets the sums of W's rows
g and g + 8 with x's rows 2 t and 2 t + 1: columns 0 and 1 of ``[T, 4]``, and 2 and 3.

The interpreter knows no assembly: with PLAIN the same registers are made and multiplied by Triton's own arithmetic.
"""

# ruff: noqa: RET505 - Triton leaves out the branch not taken only when both stand in one if statement.
from __future__ import annotations

import triton
import triton.language as tl


def _text(lines: list[str]) -> tl.constexpr:
    return tl.constexpr("{\n" + "\n".join(lines) + "\n}")


def _int4(*, shifted: bool, scaled: bool) -> tl.constexpr:
    """Four words as registers of rows g and g + 8 (two columns), then of both again (the other two): 16 results.

    Exact: the bits of 128 + nibble, less 136 or, ``shifted``, what follows the words: 128 + zero point for row g and
    for row g + 8. ``scaled``: times what follows then, rounded.
    """
    lines = [".reg .b32 s, m;", "mov.b32 m, 0x43084308;"]
    scales = 28 if shifted else 20
    for word in range(4):
        for nibble in range(4):
            result = f"${4 * nibble + word}"
            source = f"${16 + word}"
            if nibble:
                lines.append(f"shr.u32 s, {source}, {4 * nibble};")
                source = "s"
            lines.append(f"lop3.b32 {result}, {source}, 0x000f000f, 0x43004300, 0xea;")
            row = 4 * (nibble % 2) + word
            lines.append(f"sub.rn.bf16x2 {result}, {result}, {f'${20 + row}' if shifted else 'm'};")
            if scaled:
                lines.append(f"mul.rn.bf16x2 {result}, {result}, ${scales + row};")
    return _text(lines)


def _fp8() -> tl.constexpr:
    """Four words as registers of their first and third columns, and of their second and fourth: 8 results.

    e4m3 has bfloat16's bits but for a narrower exponent: four places up, they lack a factor of 2^120.
    """
    lines = [".reg .b32 s, u, m;", "mov.b32 m, 0x7b807b80;"]
    for word in range(4):
        source = f"${8 + word}"
        lines += [f"shl.b32 s, {source}, 8;", "and.b32 s, s, 0x80008000;", f"shl.b32 u, {source}, 4;"]
        lines += ["lop3.b32 u, u, 0x07f007f0, s, 0xea;", f"mul.rn.bf16x2 ${word}, u, m;"]
        lines += [f"and.b32 s, {source}, 0x80008000;", f"shr.u32 u, {source}, 4;"]
        lines += ["lop3.b32 u, u, 0x07f007f0, s, 0xea;", f"mul.rn.bf16x2 ${4 + word}, u, m;"]
    return _text(lines)


def _pairs() -> tl.constexpr:
    """Words of x, two columns each, as the first and third of four columns, and the second and fourth."""
    lines = []
    for i in (0, 2):
        lines.append(f"prmt.b32 ${i}, ${4 + i}, ${5 + i}, 0x5410;")
        lines.append(f"prmt.b32 ${i + 1}, ${4 + i}, ${5 + i}, 0x7632;")
    return _text(lines)


def _multiply(half: int) -> tl.constexpr:
    """Two instructions, with words 0 and 1 of W or 2 and 3: operands are 4 x 4 of W, 4 of x, 4 sums."""
    lines = []
    for i in range(2):
        w = ", ".join(f"${4 + 4 * part + 2 * half + i}" for part in range(4))
        x = f"${20 + 2 * i}, ${21 + 2 * i}"
        sums = ", ".join(f"${24 + j}" if i == 0 else f"${j}" for j in range(4))
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$0, $1, $2, $3}}, {{{w}}}, {{{x}}}, {{{sums}}};"
        )
    return _text(lines)


def _registers(results: int, kind: str, *inputs: tuple[int, str]) -> tl.constexpr:
    # A result is written while inputs are still needed, so they may not share a register.
    listed = [f"=&{kind}"] * results + [name for count, name in inputs for _ in range(count)]
    return tl.constexpr(",".join(listed))


_UNPACK_INT4, _UNPACK_INT4_IN = _int4(shifted=False, scaled=False), _registers(16, "r", (4, "r"))
_UNPACK_SCALED, _UNPACK_SCALED_IN = _int4(shifted=False, scaled=True), _registers(16, "r", (12, "r"))
_UNPACK_SHIFTED, _UNPACK_SHIFTED_IN = _int4(shifted=True, scaled=False), _registers(16, "r", (12, "r"))
_UNPACK_BOTH, _UNPACK_BOTH_IN = _int4(shifted=True, scaled=True), _registers(16, "r", (20, "r"))
_UNPACK_FP8, _UNPACK_FP8_IN = _fp8(), _registers(8, "r", (4, "r"))
_PAIRS, _PAIRS_IN = _pairs(), _registers(4, "r", (4, "r"))
_MULTIPLY_0, _MULTIPLY_1 = _multiply(0), _multiply(1)
_MULTIPLY_IN = _registers(4, "f", (20, "r"), (4, "f"))


@triton.jit
def unpack_int4(w, PLAIN: tl.constexpr):
    """Four words as the instruction's four registers of W, ``[T, 4]`` each: one for each word."""
    if PLAIN:
        return _nibbles(w, 0), _nibbles(w, 4), _nibbles(w, 8), _nibbles(w, 12)
    else:
        return tl.inline_asm_elementwise(
            _UNPACK_INT4, _UNPACK_INT4_IN, [w], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=4
        )


@triton.jit
def unpack_scaled(w, s, t, PLAIN: tl.constexpr):
    """The same times the scales of rows g and g + 8, ``[T, 4]`` of two equal bfloat16 each."""
    if PLAIN:
        return (
            _scaled(_nibbles(w, 0), s), _scaled(_nibbles(w, 4), t),
            _scaled(_nibbles(w, 8), s), _scaled(_nibbles(w, 12), t),
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _UNPACK_SCALED, _UNPACK_SCALED_IN, [w, s, t],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def unpack_shifted(w, y, z, PLAIN: tl.constexpr):
    """As `unpack_int4`, less the zero points of rows g and g + 8: ``[T, 4]`` of 128 more, two equal bfloat16 each."""
    if PLAIN:
        return _shifted(w, 0, y), _shifted(w, 4, z), _shifted(w, 8, y), _shifted(w, 12, z)
    else:
        return tl.inline_asm_elementwise(
            _UNPACK_SHIFTED, _UNPACK_SHIFTED_IN, [w, y, z],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def unpack_shifted_scaled(w, y, z, s, t, PLAIN: tl.constexpr):
    """As `unpack_shifted`, times the scales of rows g and g + 8."""
    if PLAIN:
        return (
            _scaled(_shifted(w, 0, y), s), _scaled(_shifted(w, 4, z), t),
            _scaled(_shifted(w, 8, y), s), _scaled(_shifted(w, 12, z), t),
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _UNPACK_BOTH, _UNPACK_BOTH_IN, [w, y, z, s, t],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def unpack_fp8(w, PLAIN: tl.constexpr):
    """Four words of a row as registers of their first and third columns, and of their second and fourth."""
    if PLAIN:
        return _bytes(w, 0), _bytes(w, 8)
    else:
        return tl.inline_asm_elementwise(
            _UNPACK_FP8, _UNPACK_FP8_IN, [w], dtype=(tl.int32, tl.int32), is_pure=True, pack=4
        )


@triton.jit
def in_pairs(x, PLAIN: tl.constexpr):
    """Words of x in the order of columns that `unpack_fp8` gives."""
    if PLAIN:
        x0, x1, x2, x3 = _four(x)
        return _joined(
            (x0 & 65535) | (x1 << 16), ((x0 >> 16) & 65535) | (x1 & -65536),
            (x2 & 65535) | (x3 << 16), ((x2 >> 16) & 65535) | (x3 & -65536),
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(_PAIRS, _PAIRS_IN, [x], dtype=tl.int32, is_pure=True, pack=4)


@triton.jit
def multiply(a, x, c, HALF: tl.constexpr, PLAIN: tl.constexpr):
    """The sums ``c`` and two instructions: words 2 HALF and 2 HALF + 1 of W's registers ``a``, two words of x each."""
    if PLAIN:
        return _multiply_plain(a, x, c, HALF)
    elif HALF == 0:
        return tl.inline_asm_elementwise(
            _MULTIPLY_0, _MULTIPLY_IN, [a[0], a[1], a[2], a[3], x, c], dtype=tl.float32, is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(
            _MULTIPLY_1, _MULTIPLY_IN, [a[0], a[1], a[2], a[3], x, c], dtype=tl.float32, is_pure=True, pack=4
        )


# ------------------------------------------------------------------ in the interpreter


@triton.jit
def pair(word):
    """A register's two bfloat16 as float32, that of the lower bits first."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _four(v):
    even, odd = tl.split(tl.reshape(v, [v.shape[0], 2, 2]))
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    return v0, v1, v2, v3


@triton.jit
def _joined(v0, v1, v2, v3):
    return tl.reshape(tl.join(tl.join(v0, v2), tl.join(v1, v3)), [v0.shape[0], 4])


@triton.jit
def _packed(low, high):
    """Two float32 that are bfloat16 already, as a register."""
    bits = (low.to(tl.int32, bitcast=True) >> 16) & 65535
    return bits | (high.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def _nibbles(w, AT: tl.constexpr):
    return _packed(((w >> AT) & 15).to(tl.float32) - 8.0, ((w >> (AT + 16)) & 15).to(tl.float32) - 8.0)


@triton.jit
def _shifted(w, AT: tl.constexpr, z):
    z0, z1 = pair(z)
    return _packed(((w >> AT) & 15).to(tl.float32) + 128 - z0, ((w >> (AT + 16)) & 15).to(tl.float32) + 128 - z1)


@triton.jit
def _scaled(a, s):
    a0, a1 = pair(a)
    s0, s1 = pair(s)
    return _packed((a0 * s0).to(tl.bfloat16).to(tl.float32), (a1 * s1).to(tl.bfloat16).to(tl.float32))


@triton.jit
def _bytes(w, AT: tl.constexpr):
    return _packed(_e4m3((w >> AT) & 255), _e4m3((w >> (AT + 16)) & 255))


@triton.jit
def _e4m3(bits):
    magnitude = ((bits & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(bits > 127, -magnitude, magnitude)


@triton.jit
def _multiply_plain(a, x, c, HALF: tl.constexpr):
    xs = _four(x)
    a0, a1, a2, a3 = _four(a[0]), _four(a[1]), _four(a[2]), _four(a[3])
    for i in tl.static_range(2):
        upper = _outer(a0[2 * HALF + i], xs[2 * i]) + _outer(a2[2 * HALF + i], xs[2 * i + 1])
        lower = _outer(a1[2 * HALF + i], xs[2 * i]) + _outer(a3[2 * HALF + i], xs[2 * i + 1])
        c += tl.reshape(tl.permute(tl.join(upper, lower), (0, 2, 1)), [c.shape[0], 4])
    return c


@triton.jit
def _outer(a, b):
    """Rows of W, one a group of four lanes, by rows of x: each lane's rows 2 t and 2 t + 1, ``[T, 2]``."""
    a0, a1 = pair(a)
    b0, b1 = pair(b)
    return tl.reshape(_outer_column(a0, b0) + _outer_column(a1, b1), [a.shape[0], 2])


@triton.jit
def _outer_column(a, b):
    """``[warps, 8 rows of W, 8 rows of x]``: one column of each lane, summed over the four lanes of a group."""
    WARPS: tl.constexpr = a.shape[0] // 32
    return tl.sum(tl.reshape(a, [WARPS, 8, 1, 4]) * tl.reshape(b, [WARPS, 1, 8, 4]), 3)
