from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.cli import chat, generate, serve
from firsttoken.cli.main import build_parser, main
from firsttoken.cli.options import ENGINE_OPTIONS, SAMPLING_OPTIONS, engine_args, port, sampling_fields, size
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import InvalidRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.targets_file import read_targets
from firsttoken.server.config import ServerConfig


def parse(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("4096", 4096),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("2g", 2 << 30),
        ("2GB", 2_000_000_000),
        ("1.5MiB", 3 << 19),
        ("10k", 10240),
        ("1T", 1 << 40),
        ("512B", 512),
    ],
)
def test_size_reads(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "0.1", "1 2", "two", "1PiB", "1e9", "nan", "1i"])
def test_size_refuses(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="size"):
        size(text)


@given(st.integers(1, 2**50))
def test_size_keeps_plain_numbers(value: int) -> None:
    assert size(str(value)) == size(f"{value}B") == value


@pytest.mark.parametrize("text", ["-1", "65536", "http"])
def test_port_refuses(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        port(text)


def test_every_engine_field_has_an_option() -> None:
    assert {"model", *ENGINE_OPTIONS} == set(EngineArgs.__struct_fields__)
    assert set(SAMPLING_OPTIONS) <= set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("words", [["serve"], ["chat"], ["generate", "--prompt", "x"]])
def test_without_flags_the_structs_defaults_hold(words: list[str]) -> None:
    assert engine_args(parse(*words)) == EngineArgs()


def test_defaults_told_by_help_are_the_structs() -> None:
    config, args = ServerConfig(), EngineArgs()
    text = _help("serve")
    assert f"default: {config.host})" in text
    assert f"default: {config.port};" in text
    assert f"default: {config.drain_s:.0f})" in text
    assert f"default: {config.max_body_bytes >> 20}MiB)" in text
    assert f"default: {config.max_messages})" in text
    assert f"default: {config.max_prompts})" in text
    assert f"default: {config.max_request_cost})" in text
    assert f"default: {config.max_connections})" in text
    assert f"default: {args.max_num_seqs})" in text
    assert args.prefix_caching
    assert not args.offline
    assert f"default: {generate.MAX_TOKENS})" in _help("generate")
    assert f"default: {chat.MAX_TOKENS})" in _help("chat")


def _help(command: str) -> str:
    parser = argparse.ArgumentParser()
    {"serve": serve, "generate": generate, "chat": chat}[command].add_arguments(parser)
    return " ".join(parser.format_help().split())


TARGETS = str(Path(__file__).parent / "targets.toml")

FLAGS: list[tuple[list[str], dict[str, Any]]] = [
    (["some/model"], {"model": "some/model"}),
    (["--device", "cpu"], {"device": "cpu"}),
    (["--dtype", "float32"], {"dtype": "float32"}),
    (["--quantization", "none"], {"quantization": "none"}),
    (["--kv-dtype", "bfloat16"], {"kv_dtype": "bfloat16"}),
    (["--max-model-len", "512"], {"max_model_len": 512}),
    (["--max-num-seqs", "3"], {"max_num_seqs": 3}),
    (["--kv-memory", "2GiB"], {"kv_memory": 2 << 30}),
    (["--kv-host-memory", "3GiB"], {"kv_host_memory": 3 << 30}),
    (["--kv-disk", "/x", "--kv-host-memory", "9g"], {"kv_disk": "/x", "kv_host_memory": 9 << 30}),
    (
        ["--kv-disk-size", "5GiB", "--kv-disk", "/x", "--kv-host-memory", "9g"],
        {"kv_disk_size": 5 << 30, "kv_disk": "/x", "kv_host_memory": 9 << 30},
    ),
    (["--kv-eviction", "lru"], {"kv_eviction": "lru"}),
    (["--no-prefix-caching"], {"prefix_caching": False}),
    (["--prefix-caching"], {"prefix_caching": True}),
    (["--prefill-tokens", "7"], {"prefill_tokens": 7}),
    (["--mixed-prefill-tokens", "7"], {"mixed_prefill_tokens": 7}),
    (["--in-flight", "2"], {"in_flight": 2}),
    (["--batch-window", "2ms"], {"batch_window": "2ms"}),
    (["--engine-core", "0"], {"engine_core": 0}),
    (["--deterministic"], {"deterministic": True}),
    (["--threads", "1"], {"threads": 1}),
    (["--flight-dir", "/x"], {"flight_dir": "/x"}),
    (["--flight-dir", "none"], {"flight_dir": None}),
    (["--offline"], {"offline": True}),
    (["--revision", "v2"], {"revision": "v2"}),
    (["--pooling", "mean"], {"pooling": "mean"}),
    (["--chat-template", "x.jinja"], {"chat_template": "x.jinja"}),
    (["--no-self-check"], {"self_check": False}),
    (["--served-model-name", "x"], {"served_model_name": "x"}),
    (["--seed", "5"], {"seed": 5}),
    (["--targets", TARGETS], {"targets": read_targets(TARGETS)}),
]


@pytest.mark.parametrize(("flags", "fields"), FLAGS)
def test_a_flag_sets_its_field(flags: list[str], fields: dict[str, Any]) -> None:
    assert engine_args(parse("serve", *flags)) == EngineArgs(**fields)


def test_every_option_is_tried_above() -> None:
    assert {name for _, fields in FLAGS for name in fields} == {"model", *ENGINE_OPTIONS}


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-num-seqs", "0"],
        ["--threads", "-1"],
        ["--kv-memory", "lots"],
        ["--port", "70000"],
        ["--no-such-flag"],
        ["--targets", "no-such.toml"],
        ["one", "two"],
    ],
)
def test_bad_usage_exits_with_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse("serve", *flags)
    assert exit_.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_sampling_fields_are_those_given() -> None:
    options = parse("generate", "--prompt", "x", "--temperature", "0.5", "--stop", "a", "--stop", "b", "--seed", "3")
    assert sampling_fields(options) == {"temperature": 0.5, "stop": ["a", "b"], "seed": 3}
    assert engine_args(options) == EngineArgs()


@pytest.mark.parametrize("flags", [["--temperature", "nan"], ["--top-p", "1.5"], ["--top-k", "-2"], ["--stop", ""]])
def test_sampling_out_of_range_is_refused(flags: list[str]) -> None:
    with pytest.raises(InvalidRequest, match=flags[0][2:].replace("-", "_")):
        sampling_fields(parse("generate", "--prompt", "x", *flags))


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-memory", "9" * 400],
        ["--kv-memory", "99999999999TiB"],
        ["--prefill-tokens", "1" + "0" * 30],
        ["--seed", "1" + "0" * 30],
        ["--seed", "-1" + "0" * 30],
        ["--threads", "9" * 5000],
    ],
)
def test_absurd_numbers_are_bad_usage(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "random:tiny-llama", *flags])
    assert caught.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert flags[0] in said
    assert len(said) < 250
