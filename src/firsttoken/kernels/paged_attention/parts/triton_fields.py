"""Heads in eight and four bits inside the GPU kernels: fields of a head (`rounded`), and how they are rounded and read.

A head ``[R, D]`` is a tuple of its fields ``[R, W]``, as many as a word of 16 bits holds elements: what a word gives is
then an operand of a product as it is, and no element moves between threads. The arithmetic is that of `rounded`.
"""

# ruff: noqa: RET505, RUF005 - Triton leaves out a branch only within one if statement, and joins tuples with a plus alone.
from __future__ import annotations

import triton
import triton.language as tl

from firsttoken.kernels.paged_attention.triton import load_turns, rotate


def _text(lines: list[str]) -> tl.constexpr:
    return tl.constexpr("{\n" + "\n".join(lines) + "\n}")


def _int4(*, raised: bool) -> tl.constexpr:
    """Two words as four pairs of bfloat16: the bits of 128 + element, and unless that will do less 128."""
    lines = [".reg .b32 s, m;", "mov.b32 m, 0x43004300;"]
    for field in range(4):
        source = "$4"
        if field:
            lines.append(f"shr.u32 s, $4, {4 * field};")
            source = "s"
        lines.append(f"lop3.b32 ${field}, {source}, 0x000f000f, 0x43004300, 0xea;")
        if not raised:
            lines.append(f"sub.rn.bf16x2 ${field}, ${field}, m;")
    return _text(lines)


def _fp8() -> tl.constexpr:
    """Two words as two pairs of bfloat16, whose wider exponent wants a factor of 2^120."""
    return _text(
        [
            ".reg .b32 s, u, m;",
            "mov.b32 m, 0x7b807b80;",
            "shl.b32 s, $2, 8;",
            "and.b32 s, s, 0x80008000;",
            "shl.b32 u, $2, 4;",
            "lop3.b32 u, u, 0x07f007f0, s, 0xea;",
            "mul.rn.bf16x2 $0, u, m;",
            "and.b32 s, $2, 0x80008000;",
            "shr.u32 u, $2, 4;",
            "lop3.b32 u, u, 0x07f007f0, s, 0xea;",
            "mul.rn.bf16x2 $1, u, m;",
        ]
    )


def _int8() -> tl.constexpr:
    """Two words as two pairs of bfloat16: the bits of 128 + the lower seven, less 256, or 128 with the eighth."""
    lines = [".reg .b32 s, m;"]
    for field, source in enumerate(("$2", "s")):
        if field:
            lines.append("shr.u32 s, $2, 8;")
        lines.append(f"lop3.b32 ${field}, {source}, 0x007f007f, 0x43004300, 0xea;")
        lines.append(f"lop3.b32 m, {source}, 0x00800080, 0x43004300, 0xae;")
        lines.append(f"sub.rn.bf16x2 ${field}, ${field}, m;")
    return _text(lines)


# Two words as two pairs of float16: a byte below that of 1,024, whose steps are 1.
_RAISED_INT8 = _text(
    [".reg .b32 m;", "mov.b32 m, 0x64646464;", "prmt.b32 $0, $2, m, 0x4240;", "prmt.b32 $1, $2, m, 0x4341;"]
)
_INT4, _RAISED_INT4, _FP8, _INT8 = _int4(raised=False), _int4(raised=True), _fp8(), _int8()
_FOUR, _TWO = tl.constexpr("=&r,=&r,=&r,=&r,r"), tl.constexpr("=&r,=&r,r")


@triton.jit
def unpack(words, KV_FORMAT: tl.constexpr, PLAIN: tl.constexpr):
    """The fields of ``words`` int16, as bfloat16 (float32 with PLAIN), before any scale."""
    if PLAIN:
        wide = words.to(tl.int32)
        if KV_FORMAT == "int4":
            return (
                (wide & 15).to(tl.float32),
                ((wide >> 4) & 15).to(tl.float32),
                ((wide >> 8) & 15).to(tl.float32),
                ((wide >> 12) & 15).to(tl.float32),
            )
        elif KV_FORMAT == "int8":
            return ((wide & 255) - 128).to(tl.float32), (((wide >> 8) & 255) - 128).to(tl.float32)
        else:
            return _from_e4m3(wide & 255), _from_e4m3((wide >> 8) & 255)
    elif KV_FORMAT == "int4":
        return tl.inline_asm_elementwise(
            _INT4, _FOUR, [words], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    elif KV_FORMAT == "int8":
        return tl.inline_asm_elementwise(_INT8, _TWO, [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(_FP8, _TWO, [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)


@triton.jit
def unpack_raised(words, KV_FORMAT: tl.constexpr, PLAIN: tl.constexpr):
    """As `unpack` gives them, but for what `raised_by` says is added to all. Fewer operations; int8 as float16."""
    if PLAIN:
        fields = unpack(words, KV_FORMAT, PLAIN)
        raised = ()
        for i in tl.static_range(len(fields)):
            raised = raised + (fields[i] + raised_by(KV_FORMAT),)
        return raised
    elif KV_FORMAT == "int4":
        return tl.inline_asm_elementwise(
            _RAISED_INT4, _FOUR, [words], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True,
            pack=2,
        )  # fmt: skip
    elif KV_FORMAT == "int8":
        return tl.inline_asm_elementwise(
            _RAISED_INT8, _TWO, [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        return unpack(words, KV_FORMAT, PLAIN)


@triton.constexpr_function
def raised_by(kv_format):
    """What `unpack_raised` adds to each element."""
    return {"int8": 1152.0, "int4": 128.0, "fp8": 0.0}[kv_format]


@triton.jit
def load_scales(tile, at, seen, PAGE: tl.constexpr, W: tl.constexpr, KV_FORMAT: tl.constexpr):
    """Scales and least values of K and of V, float32: those of positions ``at`` in the tiles at ``tile``."""
    if KV_FORMAT == "int4":
        words = (tile + 2 * PAGE * W + at % PAGE * 4).to(tl.pointer_type(tl.int32))
        k = tl.load(words, mask=seen, other=0)
        v = tl.load(words + 1, mask=seen, other=0)
        return _low(k), _high(k), _low(v), _high(v)
    else:
        words = (tile + 2 * PAGE * W + at % PAGE * 2).to(tl.pointer_type(tl.int32))
        both = tl.load(words, mask=seen, other=0)
        return _low(both), 0.0, _high(both), 0.0


@triton.jit
def field_turns(cos_sin, position, F: tl.constexpr, D: tl.constexpr, W: tl.constexpr, ROPE: tl.constexpr):
    """Cosines and sines ``[R, W / 2]`` of ``position [R]`` for each field."""
    cos, sin = (), ()
    if ROPE:
        offs_w = tl.arange(0, W)
        for i in tl.static_range(F):
            c, s = load_turns(cos_sin + i * W, position, position >= 0, offs_w, D, W)
            cos, sin = cos + (c,), sin + (s,)
    return cos, sin


@triton.jit
def load_fields(
    source,
    there,
    cos,
    sin,
    eps,
    weight,
    F: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """The heads at ``source [R]``, float32, normalised, rotated and multiplied by the Hadamard matrix; 0 where not
    ``there``."""
    offs_w = tl.arange(0, W)
    found = ()
    for i in tl.static_range(F):
        at = source[:, None] + i * W + offs_w[None, :]
        found = found + (tl.load(at, mask=there[:, None], other=0.0).to(tl.float32),)
    if NORM:
        squares = tl.zeros([R], tl.float32)
        for i in tl.static_range(F):
            squares += tl.sum(found[i] * found[i], 1)
        unit = tl.rsqrt(squares / D + eps)
        normed = ()
        for i in tl.static_range(F):
            gain = tl.load(weight + i * W + offs_w)
            normed = normed + (found[i] * unit[:, None] * gain[None, :],)
        found = normed
    if ROPE:
        turned = ()
        for i in tl.static_range(F):
            turned = turned + (rotate(found[i], cos[i], sin[i], R, W),)
        found = turned
    if SPREAD:
        found = _spread(found, D, R, W)
    return found


@triton.jit
def _spread(x, D: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """Four fields times the Hadamard matrix, the product of a small one of their number and one of their width."""
    i, j = tl.arange(0, W)[:, None], tl.arange(0, W)[None, :]
    odd = i & j
    odd = odd ^ (odd >> 4)
    odd = odd ^ (odd >> 2)
    odd = odd ^ (odd >> 1)
    signs = (1 - 2 * (odd & 1)).to(tl.float32)
    inner = ()
    for f in tl.static_range(4):
        if R >= 16:
            inner = inner + (tl.dot(x[f], signs, input_precision="tf32"),)
        else:
            inner = inner + (tl.sum(x[f][:, :, None] * signs[None, :, :], 1),)
    unit: tl.constexpr = D**-0.5
    s, t = (inner[0] + inner[1]) * unit, (inner[0] - inner[1]) * unit
    u, v = (inner[2] + inner[3]) * unit, (inner[2] - inner[3]) * unit
    return s + u, t + v, s - u, t - v


@triton.jit
def encode(x, KV_FORMAT: tl.constexpr):
    """Fields float32 as words int16 ``[R, W]``, the bits of their scale and least value int32 ``[R]``, and the fields
    that are read from these, float32."""
    if KV_FORMAT == "int4":
        return _encode_int4(x)
    elif KV_FORMAT == "int8":
        return _encode_int8(x)
    else:
        return _encode_fp8(x)


@triton.jit
def _encode_fp8(x):
    most = tl.max(tl.maximum(tl.abs(x[0]), tl.abs(x[1])), 1)
    bits = _bfloat16_bits(most * (1.0 / 448.0))
    scale = _low(bits)
    inverse = tl.where(scale == 0.0, 0.0, 1.0 / scale)
    low = _to_e4m3(x[0] * inverse[:, None])
    high = _to_e4m3(x[1] * inverse[:, None])
    kept = _from_e4m3(low) * scale[:, None], _from_e4m3(high) * scale[:, None]
    return (low | (high << 8)).to(tl.int16), bits, bits, kept


@triton.jit
def _encode_int8(x):
    # As integers the bits of sizes are in order, those of what is no number last: it reaches the scale.
    most = tl.max(tl.maximum(_size(x[0]), _size(x[1])), 1).to(tl.float32, bitcast=True)
    bits = _bfloat16_bits(most * (1.0 / 127.0))
    scale = _low(bits)
    inverse = tl.where(scale == 0.0, 0.0, 1.0 / scale)
    # At 1.5 x 2^23 a step of float32 is 1, so its lowest byte is that of 128 + the nearest number, ties to even.
    low = x[0] * inverse[:, None] + 12583040.0
    high = x[1] * inverse[:, None] + 12583040.0
    kept = (low - 12583040.0) * scale[:, None], (high - 12583040.0) * scale[:, None]
    words = (low.to(tl.int32, bitcast=True) & 255) | (high.to(tl.int32, bitcast=True) << 8)
    return words.to(tl.int16), bits, bits, kept


@triton.jit
def _size(x):
    """The bits of the absolute value, int32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _encode_int4(x):
    least = tl.min(tl.minimum(tl.minimum(x[0], x[1]), tl.minimum(x[2], x[3])), 1)
    most = tl.max(tl.maximum(tl.maximum(x[0], x[1]), tl.maximum(x[2], x[3])), 1)
    # A minimum passes over what is no number; the scale must not.
    sums = tl.sum(x[0] + x[1] + x[2] + x[3], 1)
    scale_bits = _bfloat16_bits(tl.where(sums != sums, sums, (most - least) * (1.0 / 15.0)))
    least_bits = _bfloat16_bits(least)
    scale, zero = _low(scale_bits)[:, None], _low(least_bits)[:, None]
    inverse = tl.where(scale == 0.0, 0.0, 1.0 / scale)
    words = tl.zeros(x[0].shape, tl.int32)
    kept = ()
    for i in tl.static_range(4):
        step = tl.floor((x[i] - zero) * inverse + 0.5)
        code = tl.minimum(tl.maximum(step, 0.0), 15.0).to(tl.int32) & 15
        words = words | (code << (4 * i))
        kept = kept + (code.to(tl.float32) * scale + zero,)
    return words.to(tl.int16), scale_bits, least_bits, kept


@triton.jit
def _to_e4m3(x):
    """The nearest e4m3 of float32, ties to even, as a byte in int32; what is beyond 448 becomes 448, and NaN NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 a step is 2^-9: that of float32 at 2^14.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 0x7E)
    return tl.where(x != x, 0x7F, code) | ((bits >> 24) & 0x80)


@triton.jit
def _from_e4m3(byte):
    """float32 of a byte in int32: its bits in place, and the difference of the biases."""
    sized = ((byte & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    sized = tl.where((byte & 0x7F) == 0x7F, float("nan"), sized)
    return tl.where((byte & 0x80) != 0, -sized, sized)


@triton.jit
def _bfloat16_bits(x):
    """The bits of ``x`` rounded to bfloat16, in int32."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = tl.where(x != x, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
    return (rounded >> 16) & 0xFFFF


@triton.jit
def _low(word):
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(word):
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def store_vector(
    tile, at, words, scale, zero, there, VALUE: tl.constexpr, PAGE: tl.constexpr, W: tl.constexpr,
    KV_FORMAT: tl.constexpr,
):  # fmt: skip
    """Put an encoded K (``VALUE`` 1: V) ``[R, W]`` of positions ``at [R]`` into their tiles at ``tile [R]``."""
    offs_w = tl.arange(0, W)
    place = tile + VALUE * (PAGE * W) + at % PAGE * W
    tl.store(place[:, None] + offs_w[None, :], words, mask=there[:, None])
    if KV_FORMAT == "int4":
        factors = tile + 2 * PAGE * W + at % PAGE * 4 + 2 * VALUE
        tl.store(factors, scale.to(tl.int16), mask=there)
        tl.store(factors + 1, zero.to(tl.int16), mask=there)
    else:
        tl.store(tile + 2 * PAGE * W + at % PAGE * 2 + VALUE, scale.to(tl.int16), mask=there)


@triton.jit
def decoded_tile(words, scale, zero, KV_FORMAT: tl.constexpr, PLAIN: tl.constexpr, COMPUTE: tl.constexpr):
    """``words [N, W]`` with their scales ``[N]`` as whole heads ``[N, D]``, as `encode` says they are read."""
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    f = unpack(words, KV_FORMAT, PLAIN)
    if KV_FORMAT == "int4":
        s, z = scale[:, None], zero[:, None]
        even = tl.join((f[0].to(tl.float32) * s + z).to(COMPUTE), (f[1].to(tl.float32) * s + z).to(COMPUTE))
        odd = tl.join((f[2].to(tl.float32) * s + z).to(COMPUTE), (f[3].to(tl.float32) * s + z).to(COMPUTE))
        return tl.reshape(tl.permute(tl.join(even, odd), (0, 3, 2, 1)), [N, 4 * W])
    else:
        s = scale[:, None]
        both = tl.join((f[0].to(tl.float32) * s).to(COMPUTE), (f[1].to(tl.float32) * s).to(COMPUTE))
        return tl.reshape(tl.permute(both, (0, 2, 1)), [N, 2 * W])
