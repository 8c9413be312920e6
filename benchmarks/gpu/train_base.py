"""The accuracy base: a Llama of 29 M parameters, trained for minutes on public-domain text.

    python -m benchmarks.gpu.train_base --text base_text.jsonl --output base30m

SmolLM2's file holds four bits already, so rounding it again says little; this one has been trained in 16. The text is
that of `benchmarks.gpu.base_text`: one JSON object a line. Its documents are dealt out by a hash of their names: one in
20 is held out for `firsttoken eval` (the first 3,000 characters of each are ``held_out.txt``), one in 20 says which
step was the best, the others are trained on, and such excerpts of 150 of these are ``calibration.txt``. The folder is
as Hugging Face's are: bfloat16 weights, a byte-level BPE of 8,192 tokens that is trained on the same documents, and
``training.json`` says what was done. Nothing of it is kept here.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

_END = "<|endoftext|>"
_EXCERPT_CHARACTERS = 3000
_CALIBRATION_DOCUMENTS = 150
_BETAS, _WEIGHT_DECAY, _CLIP, _WARM_UP_STEPS = (0.9, 0.95), 0.1, 1.0, 100
_VALIDATION_WINDOWS = 64


@dataclass(frozen=True)
class Shape:
    """A Llama whose columns are multiples of 128, so that groups of 128 weights fit everywhere."""

    hidden: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    intermediate: int = 1536
    vocab: int = 8192
    context: int = 1024
    theta: float = 10_000.0
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def config(self) -> dict[str, object]:
        """As ``config.json`` says it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "rope_theta": self.theta,
            "rms_norm_eps": self.eps,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "torch_dtype": "bfloat16",
        }


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        rows = shape.heads * shape.head_dim
        kv_rows = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, rows, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_rows, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_rows, bias=False)
        self.o_proj = nn.Linear(rows, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            one(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (part * cos + _rotated(part) * sin for part in (q, k))
        out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return mixed


def _rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class _MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.mlp = _MLP(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        out: Tensor = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return out


class Llama(nn.Module):
    """Logits of ``[batch, length]`` tokens; names of its weights are Hugging Face's without ``model.``."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(_Layer(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        angles = torch.arange(shape.context)[:, None] * shape.theta ** (
            -torch.arange(0, shape.head_dim, 2) / shape.head_dim
        )
        self.register_buffer("cos", torch.cat((angles, angles), dim=-1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), dim=-1).sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape.layers) if out else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = self.get_buffer("cos")[: tokens.shape[1]], self.get_buffer("sin")[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross entropy in nats of ``[batch, length + 1]`` tokens."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@dataclass(frozen=True)
class Split:
    train: list[str]
    validation: list[str]
    held_out: list[str]


def split(files: list[Path]) -> Split:
    """The documents, dealt out and ordered by a hash of their names. Raises ValueError where a part would be empty."""
    parts: dict[str, list[str]] = {"train": [], "validation": [], "held_out": []}
    lines = [line for file in files for line in file.read_text(encoding="utf-8").split("\n") if line]
    named = [(_hash(document), document["text"]) for document in map(json.loads, lines)]
    for drawn, text in sorted(named):
        parts[{0: "held_out", 1: "validation"}.get(drawn[-1] % 20, "train")].append(text)
    for name, texts in parts.items():
        if not texts:
            raise ValueError(f"no document of {', '.join(map(str, files))} falls to {name}: give more text")
    return Split(**parts)


def _hash(document: dict[str, str]) -> bytes:
    return hashlib.sha256(f"{document['source']}/{document['title']}".encode()).digest()


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All of them behind one another, each after an end token: int64 on the CPU."""
    ids = [np.array([0, *one.ids], dtype=np.int64) for one in tokenizer.encode_batch(texts)]
    return torch.from_numpy(np.concatenate(ids))


def _windows(tokens: Tensor, length: int, count: int, generator: torch.Generator) -> Tensor:
    """``[count, length + 1]`` tokens from places drawn at random."""
    starts = torch.randint(len(tokens) - length, (count, 1), generator=generator, device=tokens.device)
    return tokens[starts + torch.arange(length + 1, device=tokens.device)]


def _rates(steps: int, highest: float) -> Iterator[float]:
    """Of each step: rising for `_WARM_UP_STEPS`, then along a cosine to a tenth."""
    warm_up = min(_WARM_UP_STEPS, steps // 4)
    for step in range(steps):
        if step < warm_up:
            yield highest * (step + 1) / warm_up
        else:
            yield highest * (0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


@torch.no_grad()
def _validate(model: Llama, windows: Tensor, batch: int) -> float:
    model.eval()
    losses = [float(model.loss(part)) * len(part) for part in torch.split(windows, batch)]
    model.train()
    return sum(losses) / len(windows)


def train(shape: Shape, parts: dict[str, Tensor], options: argparse.Namespace) -> tuple[Llama, dict[str, object]]:
    """The model as it was where validation was best, and what was done. ``parts`` are tokens on the device."""
    device = parts["train"].device
    torch.manual_seed(options.seed)
    generator = torch.Generator(device).manual_seed(options.seed)
    model = Llama(shape, options.dropout).to(device)
    decayed = [one for one in model.parameters() if one.dim() == 2]
    others = [one for one in model.parameters() if one.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": _WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=options.rate,
        betas=_BETAS,
        fused=device.type == "cuda",
    )
    last = len(parts["validation"]) - shape.context
    starts = torch.linspace(0, last - 1, _VALIDATION_WINDOWS, device=device).long()[:, None]
    validation = parts["validation"][starts + torch.arange(shape.context + 1, device=device)]
    best, best_step, kept, began = math.inf, 0, {}, time.monotonic()
    for step, rate in enumerate(_rates(options.steps, options.rate), 1):
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16):
            loss = model.loss(_windows(parts["train"], shape.context, options.batch, generator))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % options.every == 0 or step == options.steps:
            with torch.autocast(device.type, torch.bfloat16):
                held = _validate(model, validation, options.batch)
            if held < best:
                best, best_step = held, step
                kept = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
            print(f"step {step}: train {loss.item():.3f}, validation {held:.3f}, {time.monotonic() - began:.0f} s")
    model.load_state_dict(kept)
    return model, {
        "validation_loss": best,
        "best_step": best_step,
        "train_s": round(time.monotonic() - began, 1),
        "parameters": sum(one.numel() for one in model.parameters()),
    }


def write(folder: Path, model: Llama, shape: Shape, tokenizer: Tokenizer, done: dict[str, object]) -> None:
    """The folder as Hugging Face's are, but for the texts."""
    weights = {f"model.{name}": one.to("cpu", torch.bfloat16).contiguous() for name, one in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in {
        "config.json": shape.config(),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END},
        "training.json": done,
    }.items():
        (folder / name).write_text(json.dumps(value, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="JSON lines with a text")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=64, help="windows of a step")
    parser.add_argument("--rate", type=float, default=1e-3, help="the highest learning rate")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=100, help="steps between two looks at the validation part")
    parser.add_argument("--seed", type=int, default=0)
    for field in dataclasses.fields(Shape):
        if field.type == "int":
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    options = parser.parse_args(argv)
    sizes = {field.name: getattr(options, field.name) for field in dataclasses.fields(Shape) if field.type == "int"}
    shape = Shape(**sizes)
    texts = split(options.text)
    tokenizer = train_tokenizer(texts.train, shape.vocab)
    parts = {
        name: encode(tokenizer, getattr(texts, name)).to(options.device) for name in ("train", "validation", "held_out")
    }
    print({name: len(tokens) for name, tokens in parts.items()})
    model, done = train(shape, parts, options)
    done |= {"tokens": {name: len(tokens) for name, tokens in parts.items()}, "torch": torch.__version__}
    done |= {name: getattr(options, name) for name in ("steps", "batch", "rate", "dropout", "seed")}
    options.output.mkdir(parents=True, exist_ok=True)
    write(options.output, model, shape, tokenizer, done)
    for name, documents in (("held_out", texts.held_out), ("calibration", texts.train[:_CALIBRATION_DOCUMENTS])):
        excerpts = "\n\n".join(text[:_EXCERPT_CHARACTERS] for text in documents)
        (options.output / f"{name}.txt").write_text(excerpts, encoding="utf-8")
    print(json.dumps(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
