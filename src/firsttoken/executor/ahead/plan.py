"""In which order steps are prepared: the first answer's kernels, then decode steps, then whatever else may come."""

from __future__ import annotations

from firsttoken.executor.graphs.profiles import ShapeTable, StepShape
from firsttoken.sampling.device.params import KIND_NEEDS, Needs

# A step's shape and what its sampling can do; None: any parameters.
Key = tuple[StepShape, Needs | None]

GREEDY, RANDOM, RICH = (KIND_NEEDS[kind] for kind in ("greedy", "random", "rich"))
# Token rows of steps with decode rows and chunks that are prepared for; beyond, kernels are the same.
_MIXED_TOKENS = 1024
# Lengths from each range that has kernels of its own.
_PROMPTS = (16, 32, 64, 128, 1024, 2048)
# Prompts in one step that are prepared for by themselves; more of them launch no other kernels.
_CHUNKS = (1, 2, 8)


def class_of(needs: Needs) -> Needs | None:
    """The second part of the key of a step that needs this."""
    for able in (GREEDY, RANDOM):
        if needs | able == able:
            return able
    return None


def captured_with(key: Key) -> Key:
    """The key whose kernels a graph of this one needs: random steps launch all that greedy ones do, and more, and what
    has no sampling of its own is captured as the model alone."""
    return key[0], RANDOM


def first_keys(table: ShapeTable) -> list[Key]:
    """What an engine's own first steps launch: a prompt, a decode row, and a chunk that samples nothing."""
    return _once([_prompt(table, 40, 1), table.shape(1, [], 0), _prompt(table, 1, 0)])


def urgent_keys(table: ShapeTable) -> list[Key]:
    """What a first caller's may launch too: prompts of any length. Begins with `first_keys`."""
    prompts = _once([_prompt(table, tokens, 1) for tokens in _PROMPTS])
    return list(dict.fromkeys([*first_keys(table), *prompts]))


def all_keys(table: ShapeTable) -> list[Key]:
    """What is prepared: random steps of all shapes (see `captured_with`), and those of decode rows with any
    parameters. Each key once, the most urgent first: `urgent_keys`."""
    keys = dict.fromkeys(urgent_keys(table))
    for needs in (RANDOM, None):
        keys |= dict.fromkeys((shape, needs) for shape in table.decode_shapes())
    keys |= dict.fromkeys((shape, RANDOM) for shape in (*_prompts(table), *table.mixed_shapes(_MIXED_TOKENS)))
    return list(keys)


def _once(shapes: list[StepShape]) -> list[Key]:
    return [(shape, RANDOM) for shape in dict.fromkeys(shapes)]


def _prompt(table: ShapeTable, tokens: int, samples: int) -> StepShape:
    return table.shape(0, [min(tokens, table.sizes.chunks[-1])], samples)


def _prompts(table: ShapeTable) -> list[StepShape]:
    found = []
    for size in table.sizes.chunks:
        for chunks in _CHUNKS:
            if chunks <= min(size, table.max_num_seqs):
                found += [_cut(table, size, chunks, samples) for samples in (0, chunks)]
    return found


def _cut(table: ShapeTable, tokens: int, chunks: int, samples: int) -> StepShape:
    """``tokens`` prompt tokens in so many chunks."""
    return table.shape(0, [tokens - chunks + 1, *[1] * (chunks - 1)], samples)
