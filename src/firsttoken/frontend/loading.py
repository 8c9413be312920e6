"""The front end's share of a model: its name, its tokenizer, its chat template, its defaults. No weights, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.checkpoint.model_config import GenerationConfig
from firsttoken.checkpoint.pooling import choose_pooling
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError, naming_file
from firsttoken.core.pooling import Pooling
from firsttoken.text.chat_template import ChatTemplate
from firsttoken.text.tokenizer import Tokenizer
from firsttoken.transport.channel import EngineHandle


@dataclass(frozen=True)
class ModelText:
    """``tokenizer`` is None for a model that has none (``random:``): its prompts are token ids and its text is "".
    ``chat_template`` is None when the checkpoint brings none: chat is then refused."""

    name: str
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    pooling: Pooling = field(default_factory=Pooling)


def load_text(args: EngineArgs, *, tokenizer: Tokenizer | None = None) -> ModelText:
    """Open the checkpoint that ``args.model`` names; ``tokenizer`` replaces the checkpoint's own.

    Raises `CheckpointError`, and `ConfigError` for a pooling that there is not and a file of a chat template that
    cannot be read.
    """
    checkpoint = open_checkpoint(args.model, offline=args.offline, revision=args.revision)
    spec = checkpoint.tokenizer
    template = None
    with naming_file(checkpoint.path):
        if tokenizer is None and spec is not None:
            tokenizer = Tokenizer.build(spec)
    with naming_file(args.chat_template or checkpoint.path):
        source = checkpoint.chat_template if args.chat_template is None else _read_template(args.chat_template)
        if source is not None:
            names = ("bos_token", "eos_token", "pad_token", "unk_token")
            template = ChatTemplate(source, **{name: getattr(spec, name, None) for name in names})
    return ModelText(
        args.served_model_name or checkpoint.name,
        tokenizer,
        template,
        checkpoint.generation,
        choose_pooling(args.pooling, checkpoint),
    )


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read --chat-template {path}: {why}; it is a file with a Jinja template") from None


def start_engine(args: EngineArgs, in_process: bool) -> EngineHandle:
    """On a thread of this process, or in one of its own."""
    from firsttoken.engine.launch import start_process, start_thread

    return start_thread(args) if in_process else start_process(args)
