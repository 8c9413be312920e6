"""Every "auto" becomes a value with a reason; what cannot be honoured is refused with its numbers."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from firsttoken.checkpoint.checkpoint import TensorInfo
from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.checkpoint.model_config import ModelConfig, RopeConfig
from firsttoken.core.clock import NS_PER_S, clock_replaced, now_ns
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError
from firsttoken.core.service import ClassTargets, Targets
from firsttoken.devices.cpu import CPUDevice, CPUFacts
from firsttoken.devices.cuda import CUDADevice, PlannedGPU
from firsttoken.engine.resolve import GIB, MIB, resolve
from firsttoken.executor.ahead.gpus import KNOWN
from firsttoken.scheduler import StepLoad
from firsttoken.scheduler.window import AdaptiveWindow, PredictedWindow, StaticWindow

ONE, MANY = StepLoad(1, 1, 0, 0), StepLoad(9, 9, 0, 0)

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position=4096,
    rope=RopeConfig(),
)
# 100 million weights.
TENSORS = SimpleNamespace(infos=lambda: {"w": TensorInfo("w", (10_000, 10_000), "Q4_1", 62_500_000)})
CHECKPOINT = SimpleNamespace(name="m", config=CONFIG, tensors=TENSORS)
LAPTOP = CPUFacts(threads=2, fast_bf16=True, free_memory=8 * GIB)


def _resolve(machine=LAPTOP, **args):
    return resolve(EngineArgs(**args), CHECKPOINT, [CUDADevice(), CPUDevice(machine)])[1]


def test_a_laptop_gets_packed_bfloat16_and_the_whole_length():
    config = _resolve()
    executor = config.executor
    assert (executor.device, executor.quantization, executor.dtype) == ("cpu", "packed", "bfloat16")
    assert executor.max_model_len == 4096
    assert executor.threads == 2
    assert config.in_flight == 1
    # 64 sequences of 4096 tokens at 256 B a token fit easily: no more than can be used is taken.
    assert executor.kv_blocks == 64 * 256 + 1


def test_every_choice_has_a_reason():
    said = []
    resolve(EngineArgs(), CHECKPOINT, [CPUDevice(LAPTOP)], said.append)
    assert [line.split(" = ")[0] for line in said] == [
        "device",
        "quantization",
        "dtype",
        "kv_dtype",
        "kv_memory",
        "max_model_len",
    ]


def test_unpacked_weights_are_float32_on_the_cpu():
    executor = _resolve(quantization="none").executor
    assert (executor.quantization, executor.dtype, executor.kv_format.dtype) == ("none", "float32", "float32")


def test_an_old_cpu_gets_unpacked_float32():
    old = CPUFacts(threads=4, fast_bf16=False, free_memory=8 * GIB)
    executor = _resolve(old).executor
    assert (executor.quantization, executor.dtype) == ("none", "float32")
    for quantization in ("packed", "int8", "int4"):
        with pytest.raises(ConfigError, match=f"'{quantization}' computes in bfloat16.*AVX-512"):
            _resolve(old, quantization=quantization)


@pytest.mark.parametrize(("kv_dtype", "bytes_a_vector"), [("int8", 16 + 2), ("fp8", 16 + 2), ("int4", 8 + 4)])
def test_rounded_kv_holds_more_tokens_in_the_same_memory(kv_dtype, bytes_a_vector):
    executor = _resolve(kv_memory=1 * MIB, kv_dtype=kv_dtype).executor
    assert executor.kv_format.dtype == kv_dtype
    assert executor.kv_format.bytes_per_token == 2 * 2 * 2 * bytes_a_vector
    assert executor.kv_blocks == MIB // (16 * 8 * bytes_a_vector)


def test_a_short_memory_shortens_the_length_that_was_left_to_us():
    executor = _resolve(kv_memory=1 * MIB).executor
    bytes_per_block = 16 * 2 * 2 * 2 * 16 * 2
    assert executor.kv_blocks == MIB // bytes_per_block
    assert executor.max_model_len == (executor.kv_blocks - 1) * 16


def test_a_length_that_was_asked_for_is_refused_with_the_numbers():
    with pytest.raises(
        ConfigError, match=r"max_model_len 4096 needs [\d.]+ MiB.*kv_memory is 1 MiB.*lower max_model_len"
    ):
        _resolve(kv_memory=1 * MIB, max_model_len=4096)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"device": "cuda"}, "device 'cuda' cannot be used: this torch is built without CUDA; use --device cpu"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"prefill_tokens": 0}, "prefill_tokens must be at least 1"),
        ({"deterministic": True}, "deterministic is not offered on device 'cpu'"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"dtype": "float16"}, "dtype must be one of"),
        ({"quantization": "int3"}, "quantization must be one of"),
        ({"quantization": "packed", "dtype": "float32"}, "bfloat16"),
        ({"kv_dtype": "float32"}, "kv_dtype 'float32' with dtype 'bfloat16'.*or choose one of int8, fp8, int4"),
        ({"kv_dtype": "fp16"}, "kv_dtype must be one of"),
        ({"quantization": "int8", "dtype": "float32"}, "'int8' computes in bfloat16: use --quantization none"),
        ({"quantization": "int4", "dtype": "float16"}, "dtype must be one of"),
        ({"quantization": "fp8"}, "'fp8' is for GPUs.*--quantization int8"),
        ({"max_model_len": 5000}, "max_model_len must be 1 to 4096"),
        ({"max_model_len": 0}, "max_model_len must be 1 to 4096"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"in_flight": -1}, "in_flight must be at least 1"),
        ({"engine_core": 10**6}, r"engine_core must be a processor that may be used \(.*\), got 1000000"),
        ({"threads": -2}, "threads must be at least 1"),
        ({"kv_memory": 10}, "holds no 16-token block"),
        ({"kv_memory": 300 << 10, "max_model_len": 4096}, "but kv_memory is 0.29 MiB: raise"),
        ({"kv_memory": 9 * GIB}, "kv_memory of 9216 MiB is more than the 8192 MiB that are free"),
        ({"threads": 1_000_000}, "threads may be at most 16 here, got 1000000"),
        ({"max_num_seqs": 10**9}, "max_num_seqs may be at most 4096 here, got 1000000000"),
        ({"in_flight": 10**9}, "in_flight may be at most 64 here, got 1000000000"),
    ],
)
def test_what_cannot_be_honoured_is_refused(args, words):
    with pytest.raises(ConfigError, match=words):
        _resolve(**args)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_has_room_for_all_that_may_be_planned(deterministic):
    gpu = PlannedGPU(KNOWN["h100"])
    if deterministic and not gpu.policy.deterministic:
        pytest.skip("this device does not offer it")
    args = EngineArgs(max_num_seqs=40, prefill_tokens=100, mixed_prefill_tokens=7, deterministic=deterministic)
    _, config = resolve(args, CHECKPOINT, [gpu])
    # The scheduler caps the prompts' part; deterministic decode rows are chunks beside it.
    assert config.executor.max_step_tokens == (140 if deterministic else 100)


@pytest.mark.parametrize(("slots", "length", "tokens"), [(1, 512, 512), (1, 700, 768), (2, 500, 1024), (64, 512, 8192)])
def test_steps_are_prepared_for_no_more_tokens_than_all_slots_hold(slots, length, tokens):
    args = EngineArgs(max_num_seqs=slots, max_model_len=length)
    assert resolve(args, CHECKPOINT, [PlannedGPU(KNOWN["h200"])])[1].executor.max_step_tokens == tokens
    here = _resolve(max_num_seqs=slots, max_model_len=length, prefill_tokens=1 << 14).executor
    assert here.max_step_tokens == min(1 << 14, slots * length), "where nothing is padded"


def test_a_gpu_takes_as_many_steps_in_flight_as_its_ring_has_places():
    gpu = PlannedGPU(KNOWN["h100"])
    assert resolve(EngineArgs(in_flight=8), CHECKPOINT, [gpu])[1].in_flight == 8
    with pytest.raises(ConfigError, match="in_flight may be at most 8 here, got 9"):
        resolve(EngineArgs(in_flight=9), CHECKPOINT, [gpu])


def test_weights_that_cannot_fit_are_refused_with_the_numbers():
    small = CPUFacts(threads=2, fast_bf16=True, free_memory=150_000_000)
    with pytest.raises(ConfigError, match=r"the weights of m take 0\.2 GiB in bfloat16, but only 0\.1 GiB .* are free"):
        _resolve(small)


def test_one_request_at_once_may_still_be_as_long_as_the_model_allows():
    assert _resolve(max_num_seqs=1).executor.max_model_len == CONFIG.max_position


def test_steps_are_planned_by_a_model_of_their_time_that_goes_on_learning():
    config = _resolve()
    before = config.budget.prefill_tokens(ONE, 0, 50.0)
    for _ in range(100):
        config.step_time.learn(ONE.with_chunk(0, 100), 500.0)
    assert config.budget.prefill_tokens(ONE, 0, 50.0) < before


def test_a_cap_that_was_asked_for_does_not_grow_with_the_rows():
    given = _resolve(mixed_prefill_tokens=30).budget
    assert given.prefill_tokens(MANY, 0) == given.prefill_tokens(ONE, 0) == 30


def test_a_step_has_room_for_the_larger_of_the_two_caps():
    """A mixed step may compute more prompt tokens than one alone, when that was lowered."""
    config = _resolve(prefill_tokens=16, mixed_prefill_tokens=40)
    assert config.executor.max_step_tokens >= config.budget.prefill_tokens(ONE, 0) == 40
    assert _resolve(prefill_tokens=700).executor.max_step_tokens == 700


@pytest.mark.parametrize(("window", "kind"), [("2ms", StaticWindow), ("predicted", PredictedWindow)])
def test_a_batch_window_is_found_by_its_name(window, kind):
    assert isinstance(_resolve(batch_window=window).window, kind)
    assert _resolve().window is None
    assert _resolve(batch_window="0").window is None


def test_the_adaptive_window_hears_of_the_loops_work():
    """With few that wait it grows for one reason only: the loop's thread is at its limit."""
    config = _resolve(batch_window="adaptive", targets=Targets(p1=ClassTargets(ttft_p99=100.0)))
    window, host = config.window, config.host
    assert isinstance(window, AdaptiveWindow)
    began = now_ns()
    with clock_replaced(lambda: began):
        window.first_token(NS_PER_S, 10.0, 0)
    idle_ms = window.ms
    host.resume()
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    host.pause()
    with clock_replaced(lambda: began + 50_000_000):
        window.first_token(2 * NS_PER_S, 10.0, 0)
    assert window.ms > idle_ms


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"kv_disk": "", "kv_host_memory": 64 * MIB}, "kv_disk '' is an empty folder name"),
        ({"kv_disk": " ", "kv_host_memory": 64 * MIB}, "kv_disk ' ' is an empty folder name"),
        ({"kv_disk": "/x"}, "kv_disk '/x' needs host memory"),
        ({"kv_disk_size": 5 * GIB}, "kv_disk_size of 5120 MiB is for the files in kv_disk, which is not given"),
    ],
)
def test_kv_files_without_what_they_need_are_refused(args, words):
    with pytest.raises(ConfigError, match=words):
        _resolve(**args)


def test_kv_files_take_32_gib_unless_told(monkeypatch):
    monkeypatch.setattr("firsttoken.engine.resolve.available_memory", lambda: GIB)
    for given, cap in [({}, 32 * GIB), ({"kv_disk_size": GIB}, GIB)]:
        disk = _resolve(kv_disk="/x", kv_host_memory=64 * MIB, **given).disk
        assert (str(disk.folder), disk.cap_bytes) == ("/x", cap)


def test_rounded_weights_leave_room_for_kv_and_their_gaps_as_long_as_they_were():
    checkpoint, gpu = open_checkpoint("random:llama-3.1-8b"), PlannedGPU(KNOWN["h200"])
    found = {
        name: resolve(EngineArgs(quantization=name, max_num_seqs=64), checkpoint, [gpu])[1]
        for name in ("none", "fp8", "int4")
    }
    blocks = {name: config.executor.kv_blocks for name, config in found.items()}
    bytes_per_block = found["none"].executor.kv_format.bytes_per_block
    assert 9 * GIB < (blocks["int4"] - blocks["none"]) * bytes_per_block < 11 * GIB
    assert 6 * GIB < (blocks["fp8"] - blocks["none"]) * bytes_per_block < 8 * GIB
    alone, row = StepLoad(1, 512, 0, 0), StepLoad(8, 8 * 512, 0, 0)
    steps = {name: config.step_time for name, config in found.items()}
    assert steps["int4"].ms(alone) < 0.45 * steps["none"].ms(alone)
    chunks = {name: config.budget.prefill_tokens(row, 0) for name, config in found.items()}
    assert chunks["int4"] >= 0.4 * chunks["none"], "prompts go on beside rows that decode faster"
