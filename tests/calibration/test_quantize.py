"""``firsttoken quantize``: what it writes is the model that it computed with, whatever stops it on the way."""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from firsttoken.calibration.layer import PlainLayer
from firsttoken.calibration.model import PlainModel
from firsttoken.calibration.run import Order, quantize
from firsttoken.calibration.text import thinned, windows
from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.checkpoint.hf_write import config_values
from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.cli.main import main
from firsttoken.core.errors import CheckpointError, ConfigError
from firsttoken.models import load_model
from firsttoken.models.tensors import expected_tensors
from firsttoken.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import byte_tokenizer_spec
from tests.support.tiny_folder import CONFIG as TINY
from tests.support.tiny_models import Runner

CONFIG: dict[str, Any] = {
    **TINY,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "torch_dtype": "float32",
    "eos_token_id": 257,
    "bos_token_id": 256,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": True, "attention_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 9},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
}
TEXT = "The quick brown fox jumps over the lazy dog, and nobody knows why it does so every single morning. " * 12
TOKENS = np.frombuffer(TEXT.encode(), dtype=np.uint8).astype(np.int64)


def write_model(folder: Path, **changes: Any) -> Path:
    """A model of seeded weights, large enough for every part to matter, and a tokenizer of bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    byte_tokenizer_spec(folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|eos|>", "chat_template": "{{ messages }}"}')
    # Only a folder with weights opens: the names come from a first, empty attempt at one.
    save_file({}, folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for name, shape in expected_tensors(open_checkpoint(str(folder)).config).items():
        spread = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.2 * spread if name.endswith("norm.weight") else spread * 0.2
    save_file(tensors, folder / "model.safetensors")
    return folder


def order(scheme: str = "int4", method: str = "best", group_size: int | None = None) -> Order:
    return Order(scheme, method, group_size, windows(TOKENS, 40, 640), "cpu", None)


def logits(folder: Path, ids: list[int]) -> Tensor:
    return Runner(load_model(open_checkpoint(str(folder)), device="cpu", dtype="float32", quantization="none")).whole(
        ids
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def plain_logits(checkpoint: Checkpoint, ids: list[int]) -> Tensor:
    model = PlainModel(checkpoint, torch.device("cpu"))
    model.dtype = torch.float32
    hidden = model.embedding()[torch.tensor([ids])]
    for index in range(model.config.num_layers):
        layer = model.plain(index, model.layer(index))
        hidden = layer.finished(layer.attended(hidden))
    gain = model.tensor("model.norm.weight")
    normed = torch.nn.functional.rms_norm(hidden, gain.shape, gain, model.config.rms_norm_eps)
    head = "model.embed_tokens.weight" if model.config.tie_word_embeddings else "lm_head.weight"
    return normed[0] @ model.tensor(head).t()


@pytest.mark.parametrize("family", list(FAMILIES))
@torch.inference_mode()
def test_the_folder_holds_what_was_computed(tmp_path: Path, family: str) -> None:
    source = write_model(tmp_path / "full", **FAMILIES[family])
    ids = TOKENS[100:160].tolist()
    full = logits(source, ids)
    assert torch.allclose(plain_logits(open_checkpoint(str(source)), ids), full, atol=2e-3, rtol=1e-3)
    out = tmp_path / "out"
    done = quantize(open_checkpoint(str(source)), order(), out, None)
    assert (done.group_size, len(done.layers)) == (32, 14)
    assert done.bytes_after < 0.55 * done.bytes_before, "weights are a small part of so small a model"
    found = logits(out, ids)
    assert torch.allclose(plain_logits_of_rounded(out, ids), found, atol=2e-3, rtol=1e-3)
    assert (found - full).norm() < 0.35 * full.norm()
    assert (found - full).norm() > 0.001 * full.norm(), "four bits are not free"


def plain_logits_of_rounded(folder: Path, ids: list[int]) -> Tensor:
    """By the dequantised weights of a folder, which as it is would be refused for being quantised."""
    checkpoint = open_checkpoint(str(folder))
    config = msgspec.structs.replace(checkpoint.config, quantized=None)
    return plain_logits(dataclasses.replace(checkpoint, config=config), ids)


@torch.inference_mode()
def test_packed_kernels_take_scales_of_both_signs(tmp_path: Path) -> None:
    source = write_model(tmp_path / "full")
    quantize(open_checkpoint(str(source)), order(), tmp_path / "out", None)
    scales = load_file(tmp_path / "out" / "model-00001-of-00003.safetensors")["model.layers.0.mlp.up_proj.weight_scale"]
    assert (scales < 0).any()
    assert (scales > 0).any()
    ids = TOKENS[100:104].tolist()
    checkpoint = open_checkpoint(str(tmp_path / "out"))
    packed = Runner(load_model(checkpoint, device="cpu", dtype="bfloat16", quantization="int4")).whole(ids)
    expected = logits(tmp_path / "out", ids)
    assert (packed - expected).norm() < 0.03 * expected.norm()


def test_best_loses_less_than_rounding(tmp_path: Path) -> None:
    source = write_model(tmp_path / "full")
    ids = TOKENS[100:220].tolist()
    full = logits(source, ids)
    lost = {}
    for method in ("rtn", "best"):
        quantize(open_checkpoint(str(source)), order(method=method), tmp_path / method, None)
        lost[method] = float((logits(tmp_path / method, ids) - full).norm())
    assert lost["best"] < 0.6 * lost["rtn"]


@pytest.mark.parametrize("stop_after", [0, 1])
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(tmp_path: Path, stop_after: int) -> None:
    source = open_checkpoint(str(write_model(tmp_path / "full", attention_bias=True)))
    quantize(source, order(), tmp_path / "once", None)

    def stop(index: int, _: object) -> None:
        if index == stop_after:
            raise KeyboardInterrupt

    out = tmp_path / "twice"
    with pytest.raises(KeyboardInterrupt):
        quantize(source, order(), out, None, stop)
    assert not (out / "config.json").exists(), "nothing may take it for a model"
    told: list[int] = []
    quantize(source, order(), out, None, lambda index, _: told.append(index))
    assert told == [0, 1] or (stop_after == 1 and told == []), "finished layers are told of, too"
    assert contents(out) == contents(tmp_path / "once")


def stopped(source: Path, out: Path) -> None:
    """After the first layer."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(open_checkpoint(str(source)), order(method="rtn"), out, None, stop)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a folder that was stopped after its first layer."""
    at = tmp_path_factory.mktemp("begun")
    source = write_model(at / "full")
    stopped(source, at / "out")
    return source, at / "out"


def truncate(out: Path) -> None:
    path = out / "model-00001-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def change_a_bit(out: Path) -> None:
    path = out / "model-00001-of-00003.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-7] ^= 1
    path.write_bytes(raw)


def edit_state(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = json.loads((out / "quantize.json").read_text())
    change(state)
    (out / "quantize.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda out: (out / "quantize.json").write_bytes(b'{"task"'), "is not what this command writes"),
        (
            lambda out: edit_state(out, lambda state: state["layers"].extend(state["layers"] * 2)),
            "tells of layers that",
        ),
        (lambda out: edit_state(out, lambda state: state["layers"][0].update(figures=[])), "tells of layers that"),
        (lambda out: (out / "model-00001-of-00003.safetensors").unlink(), "cannot be read"),
        (truncate, "is not as it was written"),
        (change_a_bit, "is not as it was written"),
    ],
)
def test_a_folder_that_was_damaged_meanwhile_is_not_gone_on_with(
    begun: tuple[Path, Path], tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    out = Path(shutil.copytree(begun[1], tmp_path / "out"))
    damage(out)
    with pytest.raises(CheckpointError, match=f"{words}.*remove the folder to begin anew"):
        quantize(open_checkpoint(str(begun[0])), order(method="rtn"), out, None)


def test_two_do_not_write_one_folder(begun: tuple[Path, Path], tmp_path: Path) -> None:
    source, out = begun

    def another(*_: object) -> None:
        with pytest.raises(ConfigError, match="is being written by another process"):
            quantize(open_checkpoint(str(source)), order(method="rtn"), out, None)
        raise KeyboardInterrupt

    out = Path(shutil.copytree(out, tmp_path / "out"))
    with pytest.raises(KeyboardInterrupt):
        quantize(open_checkpoint(str(source)), order(method="rtn"), out, None, another)


@pytest.mark.parametrize("room", [0, 20_000])
def test_a_full_disk_is_said_and_costs_nothing(begun: tuple[Path, Path], tmp_path: Path, room: int) -> None:
    """As a limit on the size of files, which writing meets as it does a disk's end."""
    source, out = open_checkpoint(str(begun[0])), tmp_path / "out"
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written \(.*large.*make room, and the same command"):
            quantize(source, order(method="rtn"), out, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    quantize(source, order(method="rtn"), out, None)


def test_another_task_is_not_gone_on_with(begun: tuple[Path, Path], tmp_path: Path) -> None:
    source = open_checkpoint(str(begun[0]))
    shutil.copytree(begun[1], tmp_path / "out")
    with pytest.raises(ConfigError, match="was begun with method 'rtn', not 'best'"):
        quantize(source, order(), tmp_path / "out", None)
    with pytest.raises(ConfigError, match="begun with scheme 'int4', not 'fp8'"):
        quantize(source, order(scheme="fp8"), tmp_path / "out", None)
    with pytest.raises(ConfigError, match="full holds a whole model already"):
        quantize(source, order(), begun[0], None)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="is not an empty folder"):
        quantize(source, order(), tmp_path / "other", None)


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({}, 64, r"group_size 64 does not divide the 96 columns of mlp\.down_proj: choose one of 32"),
        ({"intermediate_size": 100}, None, "group_size 32 does not divide the 100 columns"),
    ],
)
def test_groups_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, int], size: int, words: str) -> None:
    source = open_checkpoint(str(write_model(tmp_path / "full", **changes)))
    with pytest.raises(ConfigError, match=words):
        quantize(source, order(group_size=size), tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_model(tmp_path / "full")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    command = ["quantize", str(source), "--scheme", "fp8", "--out", str(tmp_path / "out"), "--json"]
    command += ["--calibration", str(text), "--context", "40", "--tokens", "400", "--device", "cpu"]
    assert main(command) == 0
    shown = capsys.readouterr()
    said = json.loads(shown.out)
    assert said["scheme"] == "fp8"
    assert said["tokens"] == 400
    assert [layer["name"] for layer in said["layers"]][:2] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
    ]
    assert all(layer["method"] in ("rtn", "gptq") and layer["mse"] > 0 for layer in said["layers"])
    assert said["bytes_before"] > said["bytes_after"] > 0
    assert said["self_check"]["top1_agreement"] > 0.8
    assert (tmp_path / "out" / "self_check.json").is_file()
    assert "quantizing full: 2/2, error of outputs up to" in shown.err
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == said["bytes_after"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "float-quantized"
    assert config["dtype"] == "bfloat16"
    assert "torch_dtype" not in config
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert main(["quantize", str(tmp_path / "out"), "--scheme", "int4", "--out", str(tmp_path / "again")]) == 2
    assert "is quantized already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--calibration", "missing.txt"], "cannot read missing.txt"),
        (["--scheme", "fp8", "--group-size", "32"], "--group-size 32 is for int4: fp8 has a scale for each row"),
        (["--method", "awq", "--scheme", "fp8"], "awq is for int4: fp8 has enough bits"),
        (["--device", "cuda"], "device 'cuda'"),
        (["--context", "128", "--calibration", "short.txt"], "two windows of 128 are the least"),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: list[str], words: str
) -> None:
    source = write_model(tmp_path / "full")
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("too short")
    command = [
        "quantize",
        str(source),
        "--scheme",
        "int4",
        "--out",
        "out",
        "--context",
        "40",
        "--tokens",
        "400",
        "--no-self-check",
    ]
    assert main([*command, *more]) == 2
    assert words in capsys.readouterr().err
    assert not Path("out").exists(), "nothing is begun that cannot be done"


def test_other_families_and_models_without_words_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_model(tmp_path / "full", architectures=["Gemma2ForCausalLM"], hidden_activation="gelu_pytorch_tanh")
    assert main(["quantize", str(source), "--scheme", "int4", "--out", str(tmp_path / "out")]) == 2
    assert "Gemma2ForCausalLM cannot be quantized here" in capsys.readouterr().err
    assert main(["quantize", "random:tiny-llama", "--scheme", "int4", "--out", str(tmp_path / "out")]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_windows_come_from_all_over_the_text() -> None:
    found = windows(range(1000), 10, 55)
    assert found[:, 0].tolist() == [0, 200, 400, 600, 800]
    assert windows(range(27), 10, 500)[:, 0].tolist() == [0, 10]
    long = "".join(map(chr, range(300, 900))) * 1000
    assert thinned(long, 10_000) == long
    few = thinned(long, 640)
    assert len(few) == 640 * 256
    assert few[: len(few) // 64] == long[: len(few) // 64]
    assert few[-1] == long[long.index(few[-1], -9375)], "from all over a long one"


def test_who_stops_it_is_told_how_to_go_on(
    begun: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    command = ["quantize", str(begun[0]), "--scheme", "int4", "--method", "rtn", "--out", str(tmp_path / "out")]
    command += ["--calibration", str(text), "--context", "40", "--tokens", "400", "--device", "cpu"]
    monkeypatch.setattr("firsttoken.cli.quantize._note", stop)
    assert main(command) == 130
    assert "stopped: the same command goes on" in capsys.readouterr().err


@pytest.mark.model
def test_a_gguf_files_configuration_and_tokenizer_are_written_out(tmp_path: Path) -> None:
    from firsttoken.checkpoint.hf_write import write_config, write_text_files

    checkpoint = open_checkpoint("smollm2")
    assert checkpoint.tokenizer is not None
    tokenizer = Tokenizer.build(checkpoint.tokenizer)
    write_text_files(checkpoint, tmp_path, tokenizer.to_json())
    write_config(tmp_path, config_values(checkpoint))
    save_file({}, tmp_path / "model.safetensors")
    written = open_checkpoint(str(tmp_path))
    assert written.config == checkpoint.config
    assert written.generation == checkpoint.generation
    assert written.chat_template == checkpoint.chat_template
    assert written.tokenizer is not None
    back = Tokenizer.build(written.tokenizer)
    for text in ("Hello, world!  Two  spaces\n", "<|im_start|>user\nWhat?<|im_end|>", "naïve 東京 🙂", ""):
        assert back.encode(text) == tokenizer.encode(text)
    assert (back.bos_id, back.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert back.special_ids == tokenizer.special_ids


def test_attention_of_a_window_sees_no_further(tmp_path: Path) -> None:
    source = open_checkpoint(str(write_model(tmp_path / "full", **FAMILIES["mistral"])))
    model = PlainModel(source, torch.device("cpu"))
    layer: PlainLayer = model.plain(0, model.layer(0))
    hidden = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(1))
    changed = hidden.clone()
    changed[:, 0] += 1
    apart = (layer.attended(hidden) - layer.attended(changed)).abs().amax(-1)[0]
    assert (apart[1:9] > 0).all()
    assert (apart[9:] == 0).all()
