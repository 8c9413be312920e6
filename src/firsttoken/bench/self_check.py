"""Recording the reference of a model folder's self-check, through the engine's own door.

Two engines are asked: the reference, a model in full, for what it thinks of a few prompts, and then the folder, whose
own start compares the two. How near it came, with room for other devices and dtypes, are the limits beyond which a
later start refuses the files.
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
# What another device, dtype or kind of rounding may lose on top of what was measured; damage loses far more.
_AGREEMENT_ROOM = 0.2
_KL_ROOM, _KL_FACTOR = 0.3, 3.0


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
    unchecked = msgspec.structs.replace(reference, max_model_len=LONGEST, self_check=False)
    with LLM(**msgspec.structs.asdict(unchecked)) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [list(tokenizer.encode(text))[:LONGEST] for text in PROMPTS]
        prompts = [prompt for prompt in prompts if len(prompt) > GIVEN]
        if not prompts:
            raise BenchFailed(f"{reference.model}: no prompt of the self-check has more than {GIVEN} tokens")
        told = Reference(
            model=llm.info.model,
            quantization=llm.info.quantization,
            dtype=llm.info.dtype,
            given=GIVEN,
            prompts=prompts,
            guesses=[_rounded(guess) for guess in guesses(llm, prompts, first=GIVEN)],
        )
    write_reference(folder, told)
    say(f"asking {folder.name}")
    own = EngineArgs(
        model=str(folder.absolute()),
        device=reference.device,
        threads=reference.threads,
        kv_memory=reference.kv_memory,
        max_model_len=LONGEST,
    )
    with LLM(**msgspec.structs.asdict(own)) as llm:
        checked = llm.info.self_check
    assert checked is not None, "the reference that was just written"
    limits = Limits(
        min_top1_agreement=round(max(checked.top1_agreement - _AGREEMENT_ROOM, 0.0), 4),
        max_kl=round(checked.kl * _KL_FACTOR + _KL_ROOM, 4),
    )
    write_reference(folder, msgspec.structs.replace(told, limits=limits))
    return checked


def _rounded(guess: Guess) -> Guess:
    """To five digits after the point, far below what rounding weights changes."""
    return Guess(round(guess.logprob, 5), tuple((token, round(logprob, 5)) for token, logprob in guess.likeliest))
