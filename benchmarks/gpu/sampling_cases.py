"""What `benchmarks.gpu.sampling` runs: rows of parameters, logits to choose from, and checks against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from firsttoken.core.sampling_params import SamplingParams
from firsttoken.kernels.sample import reference
from firsttoken.kernels.sample.state import Outputs
from firsttoken.sampling import reference as host_reference
from firsttoken.sampling.device.params import Needs
from firsttoken.sampling.device.results import read
from firsttoken.sampling.device.sampler import DeviceSampler

PENALTIES = SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.1)
CASES: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "top_k 50": SamplingParams(top_k=50),
    "top_k 50 top_p 0.9": SamplingParams(top_k=50, top_p=0.9),
    "penalties": PENALTIES,
    "logprobs 20": SamplingParams(temperature=0, logprobs=20),
    "logprobs 20 top_p 0.9": SamplingParams(top_p=0.9, logprobs=20),
}
_MIXED = (
    *CASES.values(),
    SamplingParams(top_k=3000, top_p=0.95, temperature=2.0),
    SamplingParams(top_k=20_000),
    SamplingParams(logit_bias={3: 4.0, 17: -100.0}, min_tokens=10_000, max_tokens=None, top_p=0.99, logprobs=0),
)
STOPS = (1, 2)


def make_logits(rows: int, vocab: int, kind: str, seed: int) -> Tensor:
    """float32 [rows, vocab] on the GPU: "peaked" like a language model's (a few hundred candidates over a normal bulk),
    "flat" (normal: the nucleus holds much of the vocabulary) or "tied" (few distinct values)."""
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(rows, vocab, device="cuda", generator=generator)
    if kind == "peaked":
        logits *= 2.0
        count = min(200, vocab)
        ids = torch.rand(rows, vocab, device="cuda", generator=generator).topk(count, 1).indices
        logits.scatter_add_(1, ids, torch.linspace(22, 2, count, device="cuda").expand(rows, count))
    elif kind == "tied":
        logits = logits.round()
    return logits


@dataclass
class Bed:
    """A sampler whose slots hold ``params`` in turn, each with ``known`` tokens, and what else a step needs."""

    vocab: int
    rows: int
    params: list[SamplingParams]
    known: int
    device: str = "cuda"

    def __post_init__(self) -> None:
        self.sampler = DeviceSampler(self.vocab, self.rows, self.rows, self.device)
        generator = np.random.default_rng(0)
        tokens = generator.integers(0, self.vocab, (self.rows, self.known + 8)).astype(np.int32)
        self.known_tokens = tokens
        self.table = torch.from_numpy(tokens).to(self.device)
        for slot in range(self.rows):
            self.sampler.start(
                slot,
                self.of(slot),
                slot + 7,
                tokens[slot, : self.known],
                self.known // 2,
                STOPS if self.vocab > 2 else (),
            )
        self.slots = torch.arange(self.rows, dtype=torch.int32, device=self.device)
        self.positions = torch.full((self.rows,), self.known, dtype=torch.int32, device=self.device)
        self.needs = self.sampler.needs(range(self.rows))
        # Kernels write to pinned host memory: what the executor may do too.
        self.out = Outputs.allocate(
            self.rows, self.device if self.device != "cuda" else "cpu", pinned=self.device == "cuda"
        )

    def of(self, slot: int) -> SamplingParams:
        return self.params[slot % len(self.params)]

    def sample(
        self,
        logits: Tensor,
        *,
        best: tuple[Tensor, Tensor] | None = None,
        pdl: bool = False,
        needs: Needs | None = None,
    ) -> None:
        self.sampler.sample(
            logits,
            self.slots[: len(logits)],
            self.positions[: len(logits)],
            self.table,
            self.out,
            needs=self.needs if needs is None else needs,
            best=best,
            pdl=pdl,
        )


def check_rows(vocab: int, rows: int, kind: str) -> list[str]:
    """A mixed batch of ``rows`` against float64; what differs beyond rounding, one line each."""
    bed = Bed(vocab, rows, list(_MIXED), 64)
    logits = make_logits(rows, vocab, kind, seed=vocab + rows)
    if rows > 3:
        logits[3, vocab // 2] = math.nan
    bed.sample(logits)
    torch.cuda.synchronize()
    wrong = []
    samples = read(bed.out, range(rows), bed.sampler.num_logprobs(range(rows)))
    for slot, (sample, row) in enumerate(zip(samples, logits.cpu(), strict=True)):
        params, known = bed.of(slot), bed.known_tokens[slot, : bed.known].tolist()
        name = f"V={vocab} R={rows} {kind} row {slot}"
        if rows > 3 and slot == 3:
            wrong += [] if sample.error and sample.token == 0 else [f"{name}: NaN gave {sample}"]
            continue
        edited = host_reference.process(row, params, known[: bed.known // 2], known[bed.known // 2 :], STOPS)
        scores = edited if params.greedy else reference.scores(edited.float(), params, slot + 7, bed.known)
        # Rounding may move the border of a nucleus: then the token is compared by its score without one.
        close = float(scores[sample.token]) >= float(scores.max()) - 1e-3
        if sample.error or not close:
            wrong.append(f"{name}: {sample.error or sample.token}, expected {int(scores.argmax())} ({params})")
        if sample.logprobs is not None and params.logprobs is not None:
            right = host_reference.logprobs(row, sample.token, params.logprobs)
            same = (sample.logprobs.rank, sample.logprobs.top_ids) == (right.rank, right.top_ids)
            if not same or abs(sample.logprobs.logprob - right.logprob) > 1e-4:
                wrong.append(f"{name}: {sample.logprobs}, expected {right}")
    return wrong


def check_sameness(vocab: int, replays: int) -> list[str]:
    """64 mixed rows: each alone at another place, with dependent launches in a graph over many replays, and flat."""
    rows, wrong = 64, []
    bed = Bed(vocab, rows, list(_MIXED), 64)
    for kind in ("peaked", "flat"):
        logits = make_logits(rows, vocab, kind, seed=5)
        bed.sample(logits)
        torch.cuda.synchronize()
        tokens, logprobs = bed.out.tokens.clone(), bed.out.logprobs.clone()
        for slot in range(0, rows, 7):
            lonely = torch.full_like(logits[:2], math.nan)
            lonely[1] = logits[slot]
            bed.sampler.sample(
                lonely,
                torch.tensor([-1, slot], dtype=torch.int32, device="cuda"),
                bed.positions[:2],
                bed.table,
                bed.out,
                needs=bed.needs,
            )
            torch.cuda.synchronize()
            if bed.out.tokens[1] != tokens[slot] or bed.out.logprobs[1] != logprobs[slot]:
                wrong.append(f"{kind} row {slot} alone: {int(bed.out.tokens[1])}, in the batch {int(tokens[slot])}")
        bed.sample(logits, pdl=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                bed.sample(logits, pdl=True)
        for _ in range(max(1, replays // 4)):
            graph.replay()
            torch.cuda.synchronize()
            if not torch.equal(bed.out.tokens, tokens):
                wrong.append(
                    f"{kind}: dependent launches in a graph differ in {int((bed.out.tokens != tokens).sum())} rows"
                )
                break
    return wrong
