"""A step's first and last kernel are one program each: its inputs and results are a few KiB, and whoever is alone may
move the counter.

Host memory is read past the caches (volatile): the host has written the place anew since its last turn.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from firsttoken.kernels import step_io

PLACE = tl.constexpr(step_io.PLACE)
BEGAN = tl.constexpr(step_io.BEGAN)

# 16 words a thread: four loads of 16 bytes are under way at once, for each takes a microsecond over the bus.
BLOCK = 4096
END_BLOCK = 2048
LANES = 256
# Words of a start that a program takes at once, and programs that share a start: a prompt of 8,192 tokens is read in
# one round over the bus.
START_BLOCK = 1024
MOST_PARTS = 8
# The interpreter has neither the device's clock nor its fences.
COMPILED = not triton.knobs.runtime.interpret


@triton.jit
def _fence():
    """What the thread has written is there for the whole GPU before it goes on."""
    tl.inline_asm_elementwise("{ fence.acq_rel.gpu; mov.u32 $0, 0; }", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["COUNT"])
def begin_kernel(
    inputs, ring, state, patches, tables, words, ring_stride, table_stride, COUNT,
    BLOCK: tl.constexpr, LANES: tl.constexpr, COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The kernels after it may be launched dependently and read tables, slots and positions before they wait: they
    start when this one, which lets nobody start early, has ended, and its fence has put there what it wrote."""
    tl.static_assert(not PDL)
    began = tl.full([], 0, tl.int64)
    if COMPILED:
        began = globaltimer()
    source = ring + tl.load(state + PLACE) * ring_stride
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(inputs + at, tl.load(source + at, mask=at < words, volatile=True), mask=at < words)
    tl.debug_barrier()  # the patches are part of what was copied
    for start in range(0, COUNT, LANES):
        patch = start + tl.arange(0, LANES)
        live = patch < COUNT
        slot = tl.load(patches + patch * 3, mask=live, other=-1)
        live &= slot >= 0
        index = tl.load(patches + patch * 3 + 1, mask=live, other=0)
        block = tl.load(patches + patch * 3 + 2, mask=live, other=0)
        tl.store(tables + slot.to(tl.int64) * table_stride + index, block, mask=live)
    tl.store(state + BEGAN, began)
    if COMPILED:
        _fence()


@triton.jit
def _bring(source, target, words, part, parts, BLOCK: tl.constexpr):
    """This program's part of so many words from host memory."""
    for start in range(part * BLOCK, words, parts * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < words, volatile=True), mask=at < words)


@triton.jit(do_not_specialize=["at"])
def start_kernel(
    tokens, tables, state, staging, token_stride, table_stride, at,
    HEAD: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The step after it is not launched dependently, so this needs no fence. No graph holds it, and Triton compares the
    globals of a kernel at every launch: so it has none."""
    tl.static_assert(not PDL)
    area = staging + at
    head = area + tl.program_id(0) * HEAD
    slot = tl.load(head, volatile=True).to(tl.int64)
    source = area + tl.load(head + 1, volatile=True)
    known = tl.load(head + 2, volatile=True)
    held = tl.load(head + 3, volatile=True)
    if slot >= 0:
        part, parts = tl.program_id(1), tl.num_programs(1)
        _bring(source, tokens + slot * token_stride, known, part, parts, BLOCK)
        _bring(source + known, tables + slot * table_stride, held, part, parts, BLOCK)
        _bring(source + known + held, state + slot * STATE, STATE, part, parts, BLOCK)


@triton.jit
def end_kernel(
    outputs, ring, times, state, words, ring_stride,
    PLACES: tl.constexpr, BLOCK: tl.constexpr, COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.load(state + PLACE)
    began = tl.load(state + BEGAN)
    target = ring + place * ring_stride
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(outputs + at, mask=at < words), mask=at < words)
    ended = tl.full([], 0, tl.int64)
    if COMPILED:
        ended = globaltimer()
    tl.store(times + place * 2, began)
    tl.store(times + place * 2 + 1, ended)
    tl.debug_barrier()  # all threads have read the place
    tl.store(state + PLACE, (place + 1) % PLACES)
