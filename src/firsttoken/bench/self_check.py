"""Recording the reference of a model folder's self-check, through the engine's own door.

Two models are asked what they think of a few prompts: the reference, a model in full, and the folder itself. Then the
folder's own start compares itself with both. How near it came to itself, by another road, with room for other devices
and dtypes, are the limits beyond which a later start refuses the files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from firsttoken.bench.accuracy import guesses
from firsttoken.bench.errors import BenchFailed
from firsttoken.checkpoint.self_check import Limits, Reference, write_reference
from firsttoken.core.agreement import Guess, SelfCheck
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError
from firsttoken.frontend.llm import LLM
from firsttoken.transport.messages import EngineInfo

# Of several kinds, so that few weights are of no use to any.
PROMPTS = (
    "The harbour was quiet when the last boat came in, and nobody asked where it had been for so many days.",
    "Water is made of hydrogen and oxygen. When it is heated to one hundred degrees at sea level, it begins to boil.",
    "def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return result\n",
    "Question: How many days are there in a leap year?\nAnswer: There are three hundred and sixty-six days in it.",
    "In the year 1815 the war came to an end, and the governments of Europe met in Vienna to settle their borders.",
    "Dear Sir, I have the honour to acknowledge the receipt of your letter of the third of this month.",
    '{"name": "Alice", "age": 31, "city": "London", "languages": ["English", "French"], "married": false}',
    "To make bread you need flour, water, salt and yeast. Mix them, let the dough rise for an hour, and bake it.",
)
GIVEN, LONGEST = 8, 24
# What another device, dtype or kind of product may lose; damage loses far more.
_LIMITS = Limits(min_top1_agreement=0.9, max_kl=0.1)


def record(folder: Path, reference: EngineArgs, say: Callable[[str], None] = lambda _: None) -> SelfCheck:
    """Write ``self_check.json`` into a model folder; returns what its own engine's check then found.

    ``reference`` says which model gives the logits and how it is run, as in ``EngineArgs(model=..., dtype="float32",
    quantization="none")``; it must have the folder's tokens. Raises `ConfigError` for a folder that cannot be written,
    `BenchFailed` for a model without finite logits or one that knows too few of the prompts' words, and what `LLM`
    raises.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: a self-check's reference lies beside a folder's weights")
    say(f"asking {reference.model} for {len(PROMPTS)} prompts")
    info, prompts, guessed = _ask(reference)
    own = EngineArgs(
        model=str(folder.absolute()), device=reference.device, threads=reference.threads, kv_memory=reference.kv_memory
    )
    say(f"asking {folder.name}")
    _, own_prompts, own_guessed = _ask(own)
    if own_prompts != prompts:
        raise ConfigError(f"{folder} has another tokenizer than {reference.model}: they cannot be compared")
    told = Reference(
        model=info.model,
        quantization=info.quantization,
        dtype=info.dtype,
        given=GIVEN,
        prompts=prompts,
        guesses=guessed,
        own=own_guessed,
        limits=_LIMITS,
    )
    write_reference(folder, told)
    with LLM(**msgspec.structs.asdict(msgspec.structs.replace(own, max_model_len=LONGEST))) as llm:
        checked = llm.info.self_check
    assert checked is not None, "the reference that was just written"
    return checked


def _ask(args: EngineArgs) -> tuple[EngineInfo, list[list[int]], list[Guess]]:
    """What the engine says of itself, the prompts in its tokens, and what it thinks of them."""
    unchecked = msgspec.structs.replace(args, max_model_len=LONGEST, self_check=False)
    with LLM(**msgspec.structs.asdict(unchecked)) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [list(tokenizer.encode(text))[:LONGEST] for text in PROMPTS]
        prompts = [prompt for prompt in prompts if len(prompt) > GIVEN]
        if not prompts:
            raise BenchFailed(f"{args.model}: no prompt of the self-check has more than {GIVEN} tokens")
        return llm.info, prompts, [_rounded(guess) for guess in guesses(llm, prompts, first=GIVEN)]


def _rounded(guess: Guess) -> Guess:
    """To five digits after the point, far below what rounding weights changes."""
    return Guess(round(guess.logprob, 5), tuple((token, round(logprob, 5)) for token, logprob in guess.likeliest))
