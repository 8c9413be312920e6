"""The sampler on the device: its pipeline against the float64 reference, rows among others, what the host reads."""

import math

import numpy as np
import pytest
import torch

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.kernels.sample import reference as draws
from firsttoken.kernels.sample.state import CHUNK, Outputs
from firsttoken.sampling import reference
from firsttoken.sampling.device import sampler as device_sampler
from firsttoken.sampling.device.params import KIND_NEEDS, Needs
from firsttoken.sampling.device.results import read
from firsttoken.sampling.device.sampler import DeviceSampler
from firsttoken.sampling.sampler import ALL_MASKED, NON_FINITE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GREEDY = SamplingParams(temperature=0)
PROMPT, KNOWN, LENGTH = 5, 9, 12


class Bench:
    """A sampler whose slots all hold requests of KNOWN tokens, PROMPT of them the prompt."""

    def __init__(self, vocab, params, *, slots=None, stop_ids=(), tokens=None, rows=None):
        count = slots or len(params)
        self.sampler = DeviceSampler(vocab, count, rows or count, DEVICE)
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randint(0, min(vocab, 20), (count, LENGTH), generator=generator, dtype=torch.int32)
        if tokens is not None:
            self.table[:, :KNOWN] = torch.tensor(tokens, dtype=torch.int32)
        self.params = params
        self.stop_ids = stop_ids
        for slot, param in enumerate(params):
            self.start(slot, param, seed=100 + slot)

    def start(self, slot, param, seed):
        self.sampler.start(slot, param, seed, self.table[slot, :KNOWN].numpy(), PROMPT, self.stop_ids)

    def sample(self, logits, slots, *, positions=None, needs=None):
        """Tokens, table and what the host reads; ``slots`` may hold -1."""
        rows = len(slots)
        out = Outputs.allocate(rows, DEVICE)
        table = self.table.to(DEVICE).clone()
        self.sampler.sample(
            logits.to(DEVICE),
            torch.tensor(slots, dtype=torch.int32, device=DEVICE),
            torch.tensor(positions or [KNOWN] * rows, dtype=torch.int32, device=DEVICE),
            table,
            out,
            needs=self.sampler.needs([slot for slot in slots if slot >= 0]) if needs is None else needs,
        )
        return out, table.cpu()

    def read(self, out, slots):
        return read(out, slots, self.sampler.num_logprobs(slots))

    def expected(self, logits, slot):
        """What each token [V] of the row is compared by."""
        known = self.table[slot, :KNOWN].tolist()
        param = self.params[slot]
        row = reference.process(logits, param, known[:PROMPT], known[PROMPT:], self.stop_ids)
        return row if param.greedy else draws.scores(row.float(), param, 100 + slot, KNOWN)


MIXED = [
    GREEDY,
    SamplingParams(temperature=0.8),
    SamplingParams(top_p=0.7, temperature=1.5),
    SamplingParams(temperature=0, repetition_penalty=1.5, logprobs=3),
    SamplingParams(top_k=20, presence_penalty=1.5, frequency_penalty=-0.5, logprobs=0),
    SamplingParams(logit_bias={3: 5.0, 70: -100.0, 8: 100.0}, min_tokens=5, top_p=0.99, min_p=0.01),
    SamplingParams(temperature=0, allowed_token_ids=[0, 31, 32, 79], logit_bias={5: 100.0}, repetition_penalty=1.1),
]


def test_a_mixed_batch_follows_the_reference():
    vocab = 80
    bench = Bench(vocab, MIXED, stop_ids=(8, 11))
    logits = torch.randn(len(MIXED), vocab, generator=torch.Generator().manual_seed(1)) * 2
    slots = [4, 1, 6, 5, 0, 3, 2]
    out, table = bench.sample(logits, slots)
    samples = bench.read(out, slots)
    for row, sample in enumerate(samples):
        expected = bench.expected(logits[row], slots[row])
        assert sample.error is None
        assert sample.slot == slots[row]
        assert expected[sample.token] >= expected.max() - 1e-4
        assert table[slots[row], KNOWN] == sample.token
        wanted = MIXED[slots[row]].logprobs
        if wanted is None:
            assert sample.logprobs is None
        else:
            right = reference.logprobs(logits[row], sample.token, wanted)
            assert (sample.logprobs.rank, sample.logprobs.top_ids) == (right.rank, right.top_ids)
            assert sample.logprobs.logprob == pytest.approx(right.logprob, abs=1e-5)
            assert sample.logprobs.top_logprobs == pytest.approx(right.top_logprobs, abs=1e-5)
    unchanged = torch.ones_like(table, dtype=torch.bool)
    unchanged[:, KNOWN] = False
    assert torch.equal(table[unchanged], bench.table[unchanged])


def test_what_would_complete_a_bad_sequence_is_not_chosen():
    """Sequences that end with the output's own last tokens, with others, with the prompt's; each alone and all."""
    vocab, tokens = CHUNK + 33, [7, 7, 3, 4, 5, 9, 3, 4, 9]
    sequences = [
        [2070],  # by itself, in the second chunk
        [9, 50],  # goes on from the output's last token
        [3, 4, 9, 51],
        [9, 3, 4, 9, 52],  # all four of its tokens
        [5, 9, 3, 4, 9, 53],  # begins in the prompt
        [8, 54],
        [3, 9, 55],
    ]
    cases = [[one] for one in sequences] + [sequences, sequences * 5]
    params = [SamplingParams(temperature=0, bad_words_token_ids=one) for one in cases]
    bench = Bench(vocab, params, tokens=tokens)
    logits = torch.randn(len(cases), vocab, generator=torch.Generator().manual_seed(3))
    for row, bad in enumerate(cases):  # what is bad is the likeliest
        for rank, ids in enumerate(bad):
            logits[row, ids[-1]] = 50.0 + rank
    out, _ = bench.sample(logits, list(range(len(cases))))
    chosen = [sample.token for sample in bench.read(out, list(range(len(cases))))]
    assert chosen == [int(bench.expected(logits[row], row).argmax()) for row in range(len(cases))]
    assert chosen[4:] == [53, 54, 55, 55, 55]


def test_a_row_does_not_depend_on_its_neighbours_or_its_place():
    vocab = CHUNK + 33
    params = [SamplingParams(top_p=0.9), SamplingParams(top_k=30, logprobs=2), SamplingParams(temperature=2.0)]
    bench = Bench(vocab, params, rows=4)
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(2))
    needs = Needs.RANDOM | Needs.SEARCH | Needs.LOGPROBS
    together, _ = bench.sample(logits, [0, 1, 2], needs=needs)
    for place, slot in enumerate([2, 1, 0]):
        slots = [-1, -1, -1, -1]
        slots[place] = slot
        others = torch.full((4, vocab), math.nan)
        others[place] = logits[slot]
        alone, _ = bench.sample(others, slots, needs=needs)
        assert int(alone.tokens[place]) == int(together.tokens[slot])
        for name in ("logprobs", "ranks", "top_logprobs", "top_ids"):
            assert torch.equal(getattr(alone, name)[place], getattr(together, name)[slot])


@pytest.mark.parametrize("kind", ["greedy", "random", "rich"])
def test_padding_writes_nothing(kind):
    bench = Bench(40, [GREEDY, SamplingParams(top_p=0.5, logprobs=1, presence_penalty=1.0)], rows=3)
    logits = torch.zeros(3, 40)
    out, table = bench.sample(logits, [-1, 1, 0], positions=[KNOWN, -1, -1], needs=KIND_NEEDS[kind])
    assert torch.equal(table, bench.table)
    for name in Outputs.__slots__:
        assert not getattr(out, name).any()


def test_counters_and_counts_return_to_zero():
    bench = Bench(50, [SamplingParams(top_p=0.5, presence_penalty=1.0)] * 2)
    logits = torch.randn(2, 50)
    first, _ = bench.sample(logits, [0, 1])
    second, _ = bench.sample(logits, [0, 1])
    assert torch.equal(first.tokens, second.tokens)
    assert not bench.sampler._rich.counts.any()
    assert not bench.sampler._scratch.arrived.any()


def test_penalties_see_prompt_and_output():
    tokens = [0, 0, 1, 2, 3, 3, 3, 4, 0]
    params = [
        SamplingParams(temperature=0, frequency_penalty=1.0),
        SamplingParams(temperature=0, presence_penalty=2.0),
        SamplingParams(temperature=0, repetition_penalty=2.0),
        SamplingParams(temperature=0, repetition_penalty=1e-300),
    ]
    bench = Bench(10, params, tokens=[tokens] * 4)
    logits = torch.tensor([6.0, 4.9, 4.8, 6.5, 5.5, 1.0, -math.inf, 0.0, -3e38, 2.5]).repeat(4, 1)
    bench.sample(logits, [0, 1, 2, 3])
    work = bench.sampler._rich.work.cpu()
    for slot, param in enumerate(params):
        expected = reference.process(logits[slot], param, tokens[:PROMPT], tokens[PROMPT:], ())
        torch.testing.assert_close(work[slot].double(), expected, rtol=1e-6, atol=0)


def test_min_tokens_forbids_stops_until_then():
    bench = Bench(30, [SamplingParams(temperature=0, min_tokens=KNOWN - PROMPT + 1)], stop_ids=(7, -1, 30))
    logits = torch.zeros(1, 30)
    logits[0, 7], logits[0, 9] = 5, 4
    at, _ = bench.sample(logits, [0])
    after, _ = bench.sample(logits, [0], positions=[KNOWN + 1])
    assert (int(at.tokens), int(after.tokens)) == (9, 7)


def test_min_tokens_without_stops_needs_nothing():
    bench = Bench(30, [SamplingParams(temperature=0, min_tokens=3)], stop_ids=(30,))
    assert bench.sampler.needs([0]) == Needs.NOTHING


def test_lists_grow_with_the_longest_and_keep_the_others():
    short, long = {5: 50.0}, dict.fromkeys(range(300), -100.0)
    bench = Bench(400, [SamplingParams(temperature=0, logit_bias=short), GREEDY])
    bench.start(1, SamplingParams(temperature=0, logit_bias=long), seed=0)
    out, _ = bench.sample(torch.zeros(2, 400), [0, 1])
    assert out.tokens.tolist() == [5, 300]


def test_a_slot_passes_to_the_next_request():
    bench = Bench(30, [SamplingParams(temperature=0, logit_bias={4: 90.0}, logprobs=2)])
    bench.sampler.retire(0)
    assert bench.sampler.needs([0]) == Needs.NOTHING
    bench.start(0, GREEDY, seed=0)
    logits = torch.zeros(1, 30)
    logits[0, 11] = 1
    out, _ = bench.sample(logits, [0], needs=KIND_NEEDS["rich"])
    assert int(out.tokens) == 11
    assert bench.read(out, [0])[0].logprobs is None


def test_errors_are_a_rows_own():
    everything = dict.fromkeys(range(6), -100.0)
    params = [
        SamplingParams(top_p=0.5),
        SamplingParams(logprobs=2, presence_penalty=1.0),
        SamplingParams(temperature=0, min_tokens=9, logprobs=1),
        GREEDY,
        SamplingParams(temperature=0, logit_bias=everything),
    ]
    bench = Bench(6, params, stop_ids=tuple(range(6)))
    logits = torch.zeros(5, 6)
    logits[0, 3] = math.nan
    logits[1, 2] = math.inf
    logits[3, 5] = 1
    logits[4] = torch.arange(6)
    out, table = bench.sample(logits, [0, 1, 2, 3, 4])
    samples = bench.read(out, [0, 1, 2, 3, 4])
    assert [sample.error for sample in samples] == [NON_FINITE, NON_FINITE, ALL_MASKED, None, None]
    assert [sample.code for sample in samples] == [None, None, "no_token_possible", None, None]
    assert [sample.token for sample in samples] == [0, 0, 0, 5, 5]
    assert table[:, KNOWN].tolist() == [0, 0, 0, 5, 5]
    assert all(sample.logprobs is None for sample in samples)


def test_log_probabilities_leave_out_the_impossible():
    bench = Bench(CHUNK + 9, [SamplingParams(temperature=0, logprobs=20)] * 2)
    logits = torch.full((2, CHUNK + 9), -math.inf)
    logits[0, 4], logits[0, CHUNK + 2], logits[0, 1] = 1.0, 1.0, -2.0
    logits[1] = 0.0
    out, _ = bench.sample(logits, [0, 1])
    few, many = bench.read(out, [0, 1])
    assert few.logprobs.top_ids == [4, CHUNK + 2, 1]
    assert few.logprobs.top_logprobs == pytest.approx(torch.log_softmax(torch.tensor([1.0, 1, -2]), 0).tolist())
    assert many.logprobs.top_ids == list(range(20))
    assert many.logprobs.logprob == pytest.approx(-math.log(CHUNK + 9), abs=1e-5)


@pytest.mark.parametrize(
    ("params", "kind", "needs"),
    [
        (GREEDY, "greedy", Needs.NOTHING),
        (SamplingParams(temperature=0, top_p=0.5), "greedy", Needs.NOTHING),
        (SamplingParams(), "random", Needs.RANDOM),
        (SamplingParams(min_p=0.1), "random", Needs.RANDOM),
        (SamplingParams(top_k=1000), "random", Needs.RANDOM),  # all tokens
        (SamplingParams(top_k=10), "random", Needs.RANDOM | Needs.SEARCH),
        (SamplingParams(temperature=0, logprobs=0), "rich", Needs.LOGPROBS),
        (SamplingParams(temperature=0, min_tokens=1), "rich", Needs.EDITS),
        (SamplingParams(logit_bias={1: 1.0}), "rich", Needs.RANDOM | Needs.EDITS),
        (SamplingParams(frequency_penalty=0.1, top_p=0.9), "rich", Needs.RANDOM | Needs.SEARCH | Needs.EDITS),
    ],
)
def test_kinds(params, kind, needs):
    sampler = DeviceSampler(1000, 2, 1, DEVICE)
    sampler.start(1, params, 0, np.array([3]), 1, (2,))
    assert sampler.needs([1]) == needs
    assert sampler.is_plain(1) == (kind != "rich")
    assert needs & ~KIND_NEEDS[kind] == Needs.NOTHING


@pytest.mark.parametrize("params", MIXED)
def test_a_slot_may_be_taken_and_its_state_brought_by_another(params):
    ours, theirs = DeviceSampler(90, 2, 1, DEVICE), DeviceSampler(90, 2, 1, DEVICE)
    tokens, stops = np.array([3, 4]), (2, 95)
    ours.start(1, params, -5, tokens, 1, stops)
    row = theirs.take(1, params, -5, 1, stops)
    theirs.words[1] = torch.from_numpy(row.view(np.int32)).to(DEVICE)
    if not theirs.is_plain(1):
        theirs.equip(1, params, tokens, stops)
    assert torch.equal(ours.words, theirs.words)
    assert torch.equal(ours._edit_ids, theirs._edit_ids)
    assert torch.equal(ours._edit_values, theirs._edit_values)
    assert (ours.needs([1]), ours.num_logprobs([1])) == (theirs.needs([1]), theirs.num_logprobs([1]))
    assert (theirs._rich is not None) == (not theirs.is_plain(1))


def test_what_does_not_fit_is_refused():
    bench = Bench(30, [GREEDY])
    sampler, out = bench.sampler, Outputs.allocate(1, DEVICE)
    row = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    table = bench.table.to(DEVICE)

    def sample(logits, slots=row, best=None):
        sampler.sample(logits.to(DEVICE), slots, row, table, out, needs=Needs.NOTHING, best=best)

    with pytest.raises(ValueError, match=r"logits must be contiguous torch\.float32 \[1, 30\], got torch\.float64"):
        sample(torch.zeros(1, 30, dtype=torch.float64))
    with pytest.raises(ValueError, match="2 rows of logits, but this sampler was built for 1"):
        sample(torch.zeros(2, 30))
    with pytest.raises(ValueError, match=r"slots must be contiguous torch\.int32"):
        sample(torch.zeros(1, 30), slots=row.long())
    with pytest.raises(ValueError, match="best indices"):
        sample(torch.zeros(1, 30), best=(torch.zeros(1, 2, device=DEVICE), torch.zeros(1, 2, device=DEVICE)))
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        bench.start(0, SamplingParams(logit_bias={30: 1.0}), seed=0)
    with pytest.raises(ValueError, match="token ids must be in 0 to 29, got 3 to 30"):
        sampler.start(0, SamplingParams(presence_penalty=1), 0, np.array([3, 30]), 1)


def test_masked_rows_without_other_edits_choose_likewise_whatever_the_chunk(monkeypatch):
    """Their segment leaves out what lists and penalties need, so that a graph may hold it."""
    monkeypatch.setattr(device_sampler, "edit", None)
    monkeypatch.setattr(device_sampler, "forbid", None)
    vocab = CHUNK + 71
    params = [GREEDY, SamplingParams(temperature=0.9), SamplingParams(top_p=0.8), GREEDY]
    bench = Bench(vocab, params)
    sampler, words = bench.sampler, -(-vocab // 32)
    allowed = [[3, 40, CHUNK + 5, vocab - 1], range(CHUNK - 40, vocab), range(0, vocab, 7), range(vocab)]
    masks = np.zeros((4, words), dtype=np.int32)
    for slot in range(3):
        row = sampler.take(slot, params[slot], 100 + slot, PROMPT, masked=True)
        sampler.words[slot] = torch.from_numpy(row).view(torch.int32)
        sampler.equip(slot, params[slot], bench.table[slot, :KNOWN].numpy())
        bits = np.zeros(32 * words, dtype=np.bool_)
        bits[list(allowed[slot])] = True
        masks[slot] = np.packbits(bits, bitorder="little").view(np.int32)
    sampler.set_masks(masks)
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(5))
    out, _ = bench.sample(logits, [0, 1, 2, 3])
    assert not out.errors.any()
    for slot, token in enumerate(out.tokens.tolist()):
        left = torch.full((vocab,), -torch.inf)
        left[list(allowed[slot])] = logits[slot, list(allowed[slot])]
        expected = bench.expected(left, slot)
        assert expected[token] >= expected.max() - 1e-4


def test_no_rows_is_no_work():
    bench = Bench(30, [GREEDY])
    out, table = bench.sample(torch.zeros(0, 30), [], needs=KIND_NEEDS["random"])
    assert torch.equal(table, bench.table)
    assert bench.read(out, []) == []


def test_a_masked_row_chooses_among_what_its_mask_allows():
    """A mask outranks a bias; the neighbour has none, and its words are not read."""
    vocab = 70
    params = [SamplingParams(temperature=0, logit_bias={5: -100.0, 69: -100.0}, logprobs=2), GREEDY]
    bench = Bench(vocab, params)
    row = bench.sampler.take(0, params[0], 100, PROMPT, (5,), masked=True)
    bench.sampler.words[0] = torch.from_numpy(row).view(torch.int32)
    bench.sampler.equip(0, params[0], bench.table[0, :KNOWN].numpy())
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(4))
    masks = np.zeros((2, 3), dtype=np.int32)
    masks[0, 0], masks[0, 2] = 1 << 5, 1 << 5  # tokens 5 and 69
    bench.sampler.set_masks(masks)
    out, _ = bench.sample(logits, [0, 1])
    likelier = 5 if logits[0, 5] > logits[0, 69] else 69
    assert out.tokens.tolist() == [likelier, int(logits[1].argmax())]
    bench.sampler.set_masks(np.zeros_like(masks))
    out, _ = bench.sample(logits, [0, 1])
    assert [sample.error for sample in bench.read(out, [0, 1])] == [ALL_MASKED, None]
