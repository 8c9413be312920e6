"""The plan of memory against what is really made: weights, the tensors of steps, and the parts it adds up."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError
from firsttoken.core.kv_format import KVFormat
from firsttoken.core.plan import RowStart, RowWork
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.devices.cpu import PREPARED, CPUFacts
from firsttoken.devices.cuda import PlannedGPU
from firsttoken.engine.memory_plan import CPUMachine, GPUMachine, plan_memory
from firsttoken.engine.resolve import resolve
from firsttoken.executor.ahead.gpus import KNOWN
from firsttoken.executor.graphs.captures import LARGEST_LEARNED
from firsttoken.executor.memory_plan import cpu, gpu, reading
from firsttoken.executor.memory_plan.cpu import Footprint
from firsttoken.executor.memory_plan.weights import CPU_ROUNDED_BITS, FUSED, HEAD, plan_weights
from firsttoken.executor.prompt_readers import PromptReaders
from firsttoken.kernels.paged_attention import cpu as cpu_attention
from firsttoken.kernels.paged_attention.gpu_config import prefill_config
from firsttoken.models.load import load_model
from firsttoken.models.registry import family_of, known_architectures
from firsttoken.quantization import on_load
from firsttoken.sampling.prompt_logprobs import CPU_ROWS_AT_ONCE, ROWS_AT_ONCE
from tests.engine.outlined import outline_in_subprocess
from tests.support.live_bytes import LiveBytes

MIB = 1 << 20
H200 = GPUMachine(KNOWN["h200"])
LAPTOP = CPUMachine(CPUFacts(2, True, 8 << 30), Footprint(engine=250 * MIB, length=3 * MIB))
MODEL_8B = open_checkpoint("random:llama-3.1-8b")


def _plan(machine, model="random:llama-3.1-8b", context=8192, users=16, **args):
    return plan_memory(EngineArgs(model=model, **args), open_checkpoint(model), machine, context, users)


# ------------------------------------------------------------------ weights


@pytest.mark.parametrize(
    ("model", "quantization", "dtype"),
    [
        ("random:tiny-llama", "none", "float32"),
        ("random:tiny-llama", "none", "bfloat16"),
        ("random:tiny-qwen2", "packed", "bfloat16"),
        ("random:tiny-qwen3", "packed", "bfloat16"),
        ("random:tiny-qwen2", "int8", "bfloat16"),
        pytest.param("smollm2", "packed", "bfloat16", marks=pytest.mark.model),
        pytest.param("smollm2", "none", "float32", marks=pytest.mark.model),
        pytest.param("smollm2", "int4", "bfloat16", marks=pytest.mark.model),
    ],
)
def test_weights_on_the_cpu_are_those_of_the_loaded_model(model, quantization, dtype):
    checkpoint = open_checkpoint(model, offline=True)
    loaded = load_model(checkpoint, device="cpu", dtype=dtype, quantization=quantization)
    table = getattr(loaded.head, "table", None)
    own_rows = 0 if table is None or table is loaded.embedding or quantization in CPU_ROUNDED_BITS else table.nbytes
    infos = checkpoint.tensors.infos().values()
    vectors = sum(4 * info.num_elements for info in infos if len(info.shape) == 1)
    planned = plan_weights(checkpoint, "cpu", dtype, quantization)
    assert planned.kept == loaded.nbytes + own_rows + vectors


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "llama-3.2-1b", "qwen3-8b", "llama-3-70b"])
def test_weights_on_a_gpu_are_two_bytes_an_element_and_four_a_gain(shape):
    checkpoint = open_checkpoint(f"random:{shape}")
    sizes = checkpoint.tensors.infos().values()
    expected = sum(info.num_elements * (2 if len(info.shape) == 2 else 4) for info in sizes)
    assert plan_weights(checkpoint, "cuda", "bfloat16", "none").kept == expected
    assert checkpoint.config.tie_word_embeddings == (HEAD not in checkpoint.tensors.infos())


def test_what_is_fused_is_known_without_torch():
    assert {name for name in known_architectures() if family_of(name).fused} == FUSED


def test_constants_are_those_of_the_rooms_that_have_them():
    assert gpu.LARGEST_CAPTURED == LARGEST_LEARNED
    assert (cpu.QUERY_TILE, cpu.MAX_SCORES) == (cpu_attention.QUERY_TILE, cpu_attention.MAX_SCORES)
    for head_dim in (64, 80, 128, 256):
        assert gpu.tile_rows(head_dim) == prefill_config(head_dim).tile_tokens
    assert PREPARED % cpu.PRODUCTS == 0
    assert cpu.ROUNDED_AT_ONCE == on_load.ELEMENTS_AT_ONCE
    assert (reading.ROWS, reading.CPU_ROWS) == (ROWS_AT_ONCE, CPU_ROWS_AT_ONCE)


# ------------------------------------------------------------------ parts


def test_kv_is_linear_in_length_and_exact():
    form = KVFormat(dtype="bfloat16", layers=32, kv_heads=8, head_dim=128)
    for context, users in ((16, 1), (1000, 3), (8192, 16)):
        plan = _plan(H200, context=context, users=users).plan
        assert plan.kv == (users * form.blocks_for(context) + 1) * form.bytes_per_block
        assert plan.kv_token == 2 * 32 * 8 * 128 * 2


def test_a_total_is_the_sum_of_its_parts_unless_loading_takes_more():
    plan = _plan(H200).plan
    assert plan.total == plan.runtime + plan.weights + plan.kv + plan.graphs + plan.activations
    large = _plan(LAPTOP, "random:llama-3.2-1b", 512, 1).plan
    assert large.total == large.loading > large.runtime + large.weights + large.kv


def test_what_fits_is_what_may_be_asked_for():
    for machine, model in ((H200, "random:llama-3.1-8b"), (LAPTOP, "random:smollm2-135m")):
        fit = _plan(machine, model, 2048, 1)
        assert fit.fits
        assert fit.max_users >= 1
        assert _plan(machine, model, 2048, fit.max_users).fits
        assert fit.max_users == 4096 or not _plan(machine, model, 2048, fit.max_users + 1).fits


def test_what_does_not_fit_is_told_with_what_would():
    fit = _plan(GPUMachine(KNOWN["sm90"]), context=131072, users=8)
    assert not fit.fits
    assert 0 < fit.max_users < 8
    assert 0 < fit.max_context < 131072
    assert _plan(GPUMachine(KNOWN["sm90"]), context=fit.max_context, users=8).fits
    hopeless = _plan(GPUMachine(KNOWN["l4"]), "random:llama-3-70b", 100, 1)
    assert (hopeless.fits, hopeless.max_users, hopeless.max_context) == (False, 0, 0)


def test_the_plan_is_near_what_engines_on_an_h200_were_measured_to_take():
    """benchmarks/results/h200/latency_8b_b1_512.json: 131.83 GiB, with 95 % of what was left for KV."""
    policy = PlannedGPU(KNOWN["h200"]).policy
    free = 139.3 * (1 << 30)  # what a fresh context leaves of the 139.8 GiB
    weights = plan_weights(MODEL_8B, "cuda", "bfloat16", "none").kept
    kv = policy.kv_share * (free - policy.fixed_memory - weights)
    plan = _plan(H200, context=131072, users=1).plan
    assert (weights + kv + plan.graphs + plan.activations) / (1 << 30) == pytest.approx(131.83, rel=0.03)


def test_what_an_engine_would_refuse_the_plan_refuses():
    with pytest.raises(ConfigError, match="quantization 'packed' is for the CPU"):
        _plan(H200, quantization="packed")
    with pytest.raises(ConfigError, match="max_model_len must be 1 to 131072"):
        _plan(H200, context=200_000)


# ------------------------------------------------------------------ the GPU's tensors, on torch's meta device


@pytest.fixture(scope="module")
def outlined():
    """An executor of an 8B without memory, whose kernels are neither compiled nor run, and what its making left."""
    pytest.importorskip("triton")
    return outline_in_subprocess("random:llama-3.1-8b")


def test_rows_and_work_space_are_those_that_an_executor_makes(outlined):
    config = resolve(EngineArgs(model="random:llama-3.1-8b"), MODEL_8B, [PlannedGPU(KNOWN["h200"])])[1].executor
    weights = plan_weights(MODEL_8B, "cuda", "bfloat16", "none")
    work = gpu.plan_gpu_work(config, MODEL_8B.config, weights, "NVIDIA H200", 132, 8192)
    cublas = 32 * MIB
    assert work.rows - cublas == pytest.approx(outlined["rows"], rel=0.02)


def _live_as_planned(outlined, quantization):
    sizes = gpu.StepSizes(MODEL_8B.config, "NVIDIA H200", quantization)
    config = resolve(EngineArgs(model="random:llama-3.1-8b"), MODEL_8B, [PlannedGPU(KNOWN["h200"])])[1].executor
    table = gpu.ShapeTable(config.max_num_seqs, config.max_step_tokens, gpu.tile_rows(128))
    shapes = {
        "decode_64": table.shape(64, [], 0),
        "prompt_512": table.shape(0, [512], 1),
        "prompt_8192": table.shape(0, [8192], 1),
        "mixed": table.shape(64, [448], 1),
        "many": table.shape(0, [16] * 60, 60),
    }
    for name, shape in shapes.items():
        assert sizes.live(shape) == pytest.approx(outlined[name], rel=0.01), name


def test_what_is_alive_in_a_step_is_what_the_plan_says(outlined):
    _live_as_planned(outlined, "none")


def test_what_is_alive_in_a_step_of_rounded_weights_is_what_the_plan_says():
    pytest.importorskip("triton")
    _live_as_planned(outline_in_subprocess("random:llama-3.1-8b", "int4"), "int4")


def test_what_no_step_needs_is_not_planned():
    def work(slots, length):
        args = EngineArgs(model="random:llama-3.1-8b", max_num_seqs=slots, max_model_len=length, kv_memory=1 << 30)
        config = resolve(args, MODEL_8B, [PlannedGPU(KNOWN["h200"])])[1].executor
        weights = plan_weights(MODEL_8B, "cuda", "bfloat16", "none")
        return gpu.plan_gpu_work(config, MODEL_8B.config, weights, "NVIDIA H200", 132, min(8192, slots * length))

    short, longer = work(1, 512), work(1, 2048)
    assert short.graphs < longer.graphs / 4, "prompts have no more tokens than a request"
    assert longer.graphs == pytest.approx(work(1, 4096).graphs), "nor are longer ones captured"


def test_steps_that_an_idle_engine_tries_take_room_beside_what_loading_left():
    table = gpu.ShapeTable(1, 2048, 64)
    sizes = gpu.StepSizes(MODEL_8B.config, "NVIDIA H200")
    assert gpu._rehearsed(table, sizes, 1 << 40) == 0
    all_of_them = gpu._rehearsed(table, sizes, 0)
    assert all_of_them == sum(sizes.largest(shape) for shape in table.prompt_shapes(2048))
    some = gpu._rehearsed(table, sizes, 2 * sizes.live(table.shape(0, [1920], 1)))
    assert some == sizes.largest(table.shape(0, [2048], 1))


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=0, prompt_logprobs=20), SamplingParams(max_tokens=0)])
def test_reading_a_prompt_takes_no_more_than_is_planned_for_it(params):
    """Its hidden states are given; a vector is made of them, or the log-probabilities of 100 positions."""
    hidden, vocab, rows = 64, 20_000, 100
    config = SimpleNamespace(hidden_size=hidden, vocab_size=vocab)
    head = torch.randn(hidden, vocab)
    readers = PromptReaders("cpu", lambda states: states @ head)
    pooling = None if params.prompt_logprobs is not None else "mean"
    tokens = np.arange(rows, dtype="<u4").tobytes()
    readers.start(RowStart(0, 1, tokens, rows, params, 0, [], pooling=pooling))
    with LiveBytes("cpu") as live:
        states = torch.randn(rows, hidden)
        wanted = readers.wanted([RowWork(0, 0, rows, True)], lambda: [0])
        readers.read(wanted, [states[one.first : one.end] for one in wanted])
    planned = reading.reading_bytes(config, rows, element=4, on_cpu=True)
    assert live.peak <= planned
    assert pooling or live.peak > 0.7 * planned


def test_many_chunks_of_a_pooled_prompt_are_one_sum():
    """Each chunk's own, kept until the end, were more than all else for a long prompt in small ones."""
    readers = PromptReaders("cpu", lambda states: states)
    tokens = np.arange(64, dtype="<u4").tobytes()
    states = torch.randn(64, 32)
    readers.start(RowStart(0, 1, tokens, 64, SamplingParams(max_tokens=0), 0, [], pooling="mean"))
    with LiveBytes("cpu") as live:
        for at in range(0, 64, 4):
            wanted = readers.wanted([RowWork(0, at, 4, at == 60)], lambda: [0])
            reads = readers.read(wanted, [states[at : at + 4]])
    assert live.peak <= 8 * (8 * 32)  # a chunk's four rows in float64 beside the sums; there were sixteen of those
    assert torch.allclose(reads[0].pooled, states.double().mean(0).float())
