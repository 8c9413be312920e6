"""One row by a program a multiprocessor, with a ring of weights in shared memory that is filled before the wait.

A chain of products spends its time at the borders: the last sums of one kernel, its end, the first loads of the next.
Here a program keeps ``STAGES`` tiles on their way from the start, before it waits for the kernel before it: they arrive
while that one ends. Every program is resident at once and takes half a multiprocessor or less, so that the programs of
the next kernel find room beside it and fill their rings in turn.

A thread copies, and later reads, the same 16 bytes of every tile, and a warp owns whole rows: no sums across warps.
"""

# ruff: noqa: RET505 - a branch that is not taken is left out only when both stand in one if statement.
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.jit
def _larger(value_a, index_a, value_b, index_b):
    """Of two candidates the one with the larger value: NaN above all, the lower index at ties."""
    nan_a, nan_b = value_a != value_a, value_b != value_b
    lower = index_a < index_b
    first = (value_a > value_b) | ((value_a == value_b) & lower) | (nan_a & (lower | (nan_b == 0)))
    return gl.where(first, value_a, value_b), gl.where(first, index_a, index_b)


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _copy_tile(ring, slot, w, place, tile, first_group, K: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr):
    """Start copying the program's ``tile``-th tile; the groups' K blocks follow each other."""
    group, block = first_group + tile // (K // BK), tile % (K // BK)
    source = w + group.to(gl.int64) * (BN * K) + block * BK
    async_copy.async_copy_global_to_shared(ring.index(slot), source + place, eviction_policy="evict_first")


@gluon.jit
def _vector(vector, columns):
    """``vector[columns]`` in float32, or 0 where there is none."""
    if vector is None:
        return 0.0
    else:
        return gl.load(vector + columns).to(gl.float32)


@gluon.jit
def _scale(squares, eps, inverse_width, P: gl.constexpr, PP: gl.constexpr):
    """The norm's factor, or 1; every warp adds all parts itself, which spares a barrier."""
    if squares is None:
        return 1.0
    else:
        layout: gl.constexpr = gl.BlockedLayout([max(PP // 32, 1)], [32], [gl.num_warps()], [0])
        part = gl.arange(0, PP, layout=layout)
        total = gl.reduce(gl.load(squares + part, mask=part < P, other=0.0), 0, _sum)
        return gl.rsqrt(total * inverse_width + eps)


@gluon.jit
def ring_linear(
    x, w, out, residual, bias, gain, squares_in, scaled, squares_out, best_value, best_index, eps, inverse_width,
    N: gl.constexpr, K: gl.constexpr, KP: gl.constexpr, P: gl.constexpr, PP: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """``out = x W^T`` of one row; BN divides N, BK divides K, KP is the power of two from K up."""
    WARPS: gl.constexpr = gl.num_warps()
    BLOCKS: gl.constexpr = K // BK
    tiled: gl.constexpr = gl.BlockedLayout([BN // WARPS, 8], [1, 32], [WARPS, 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, tiled)
    by_column: gl.constexpr = gl.SliceLayout(0, tiled)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    shared_x = gl.allocate_shared_memory(gl.bfloat16, [KP], plain)

    program, programs = gl.program_id(0), gl.num_programs(0)
    first_group = program * (N // BN) // programs
    end_group = (program + 1) * (N // BN) // programs
    tiles = (end_group - first_group) * BLOCKS
    row = gl.arange(0, BN, layout=by_row)
    place = row[:, None] * K + gl.arange(0, BK, layout=by_column)[None, :]
    for tile in gl.static_range(STAGES - 1):
        if tile < tiles:
            _copy_tile(ring, tile, w, place, tile, first_group, K, BN, BK)
        async_copy.commit_group()
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    at = gl.arange(0, KP, layout=gl.BlockedLayout([8], [32], [WARPS], [0]))
    values = gl.load(x + at) if KP == K else gl.load(x + at, mask=at < K, other=0.0)
    scale = _scale(squares_in, eps, inverse_width, P, PP)
    shared_x.store(values)
    gl.thread_barrier()
    blocks_of_x = shared_x._reinterpret(gl.bfloat16, [KP // BK, BK], plain)

    slot, tile = 0, 0
    squares = gl.zeros([BN], gl.float32, layout=by_row)
    top = gl.full([BN], -float("inf"), gl.float32, layout=by_row)
    top_at = gl.full([BN], N, gl.int32, layout=by_row)
    for group in range(first_group, end_group):
        columns = group * BN + row
        added = _vector(residual, columns)
        bias_tile = _vector(bias, columns)
        gain_tile = _vector(gain, columns)
        acc = gl.zeros([BN, BK], gl.float32, layout=tiled)
        for block in range(BLOCKS):
            async_copy.wait_group(STAGES - 2)
            weights = ring.index(slot).load(tiled)
            part = blocks_of_x.index(block).load(by_column)
            acc += weights.to(gl.float32) * part.to(gl.float32)[None, :]
            # The slot that was read last is free: its reader is this thread.
            free = gl.where(slot == 0, STAGES - 1, slot - 1)
            if tile + STAGES - 1 < tiles:
                _copy_tile(ring, free, w, place, tile + STAGES - 1, first_group, K, BN, BK)
            async_copy.commit_group()
            slot = gl.where(slot == STAGES - 1, 0, slot + 1)
            tile += 1
        y = gl.reduce(acc, 1, _sum) * scale + bias_tile
        if KIND == "gated":
            gate, up = gl.split(gl.reshape(y, [BN // 2, 2]))
            half = group * (BN // 2) + gl.arange(0, BN // 2, layout=gate.type.layout)
            gl.store(out + half, (gate / (1.0 + gl.exp(-gate)) * up).to(gl.bfloat16))
        elif KIND == "head":
            gl.store(out + columns, y)
            top, top_at = _larger(top, top_at, y, columns)
        else:
            y += added
            gl.store(out + columns, y.to(gl.bfloat16))
            if scaled is not None:
                gl.store(scaled + columns, (y * gain_tile).to(gl.bfloat16))
                squares += y * y
    if KIND == "head":
        value, index = gl.reduce((top, top_at), 0, _larger)
        gl.store(best_value + program, value)
        gl.store(best_index + program, index)
    if scaled is not None:
        gl.store(squares_out + program, gl.reduce(squares, 0, _sum))
