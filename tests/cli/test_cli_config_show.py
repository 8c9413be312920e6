"""Where a server's options come from, and what ``firsttoken config show`` says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firsttoken.cli.config_file import keys_of
from firsttoken.cli.main import build_parser, main
from firsttoken.cli.options import engine_args
from firsttoken.cli.sources import Source, server_config, settle, variable_of
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError
from firsttoken.server.config import ServerConfig

MODEL = "random:tiny-llama"


def settled(words: list[str], environ: dict[str, str]) -> tuple[ServerConfig, EngineArgs, dict[str, Source]]:
    given = build_parser().parse_args(["serve", *words])
    sources = settle(given, given.parser, environ)
    return server_config(given), engine_args(given), sources


def test_a_flag_goes_over_a_variable_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('port = 1\nmax-messages = 1\nmax-prompts = 1\nhost = "::1"\napi-key = ["f"]\nmodel = "f"\n')
    environ = {
        "FIRSTTOKEN_PORT": "2",
        "FIRSTTOKEN_MAX_MESSAGES": "2",
        "FIRSTTOKEN_API_KEY": "a\nb\n",
        "FIRSTTOKEN_PREFIX_CACHING": "off",
        "FIRSTTOKEN_KV_MEMORY": "1GiB",
        "FIRSTTOKEN_DRAIN_S": "2.5",
        "FIRSTTOKEN_DEVICE": "",  # as if it were not set
        "FIRSTTOKEN_CACHE": "/elsewhere",  # another part's
        "FIRSTTOKENS": "nothing of ours",
        "FIRSTTOKEN_CONFIG": str(file),
    }
    config, args, sources = settled(["m", "--port", "3"], environ)
    assert config == ServerConfig(host="::1", port=3, max_messages=2, max_prompts=1, api_keys=("a", "b"), drain_s=2.5)
    assert args == EngineArgs(model="m", prefix_caching=False, kv_memory=1 << 30)
    told = {name: str(source) for name, source in sources.items()}
    assert told == {
        "model": "flag",
        "port": "flag --port",
        "max_messages": "environment FIRSTTOKEN_MAX_MESSAGES",
        "api_keys": "environment FIRSTTOKEN_API_KEY",
        "prefix_caching": "environment FIRSTTOKEN_PREFIX_CACHING",
        "kv_memory": "environment FIRSTTOKEN_KV_MEMORY",
        "drain_s": "environment FIRSTTOKEN_DRAIN_S",
        "max_prompts": f"file {file}",
        "host": f"file {file}",
    }
    other = tmp_path / "other.toml"
    other.write_text("port = 7\n")
    assert settled(["--config", str(other)], {"FIRSTTOKEN_CONFIG": str(file)})[0].port == 7


def test_each_option_has_a_variable() -> None:
    parser = build_parser().parse_args(["serve"]).parser
    names = [variable_of(key) for key in keys_of(parser)]
    assert len(set(names)) == len(names)
    assert {"FIRSTTOKEN_MODEL", "FIRSTTOKEN_API_KEY", "FIRSTTOKEN_LOG_FORMAT", "FIRSTTOKEN_KV_DISK_SIZE"} <= set(names)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("PROT", "1", "unknown variable FIRSTTOKEN_PROT in the environment; .*; did you mean FIRSTTOKEN_PORT"),
        ("HELP", "1", "unknown variable FIRSTTOKEN_HELP"),
        ("PORT", "70000", "FIRSTTOKEN_PORT = 70000 in the environment: 70000 is not a port"),
        ("PORT", "x", "'x' is not a whole number"),
        ("DTYPE", "int1", "FIRSTTOKEN_DTYPE = int1 .* expected one of auto, float32, bfloat16"),
        ("DETERMINISTIC", "maybe", "expected true or false"),
        ("DRAIN_S", "soon", "expected a number"),
        ("KV_MEMORY", "lots", "is not a size"),
        ("TARGETS", "/no/file", "FIRSTTOKEN_TARGETS = /no/file"),
        ("PORT", "tcp://10.0.0.7:8000", "Kubernetes .* enableServiceLinks"),
        ("SERVICE_HOST", "10.0.0.7", "Kubernetes .* enableServiceLinks"),
        ("PORT_8000_TCP_ADDR", "10.0.0.7", "Kubernetes .* enableServiceLinks"),
    ],
)
def test_variables_that_are_not_understood_are_refused(variable: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settled([], {f"FIRSTTOKEN_{variable}": value})


def show(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, dict[str, Any]]:
    assert main(["config", "show", "--json", *words]) == code
    told = json.loads(capsys.readouterr().out)
    assert {"command", "date", "commit", "versions", "model"} <= told.keys()
    assert "secret" not in str(told)
    return {one["name"]: one for one in told["settings"]} | {"trouble": told["not_resolved"]}


def test_each_value_is_shown_with_where_it_came_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('kv-memory = "8MiB"\notlp-endpoint = "http://me:secret@c:4318"\n')
    monkeypatch.setenv("FIRSTTOKEN_API_KEY", "secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    words = [MODEL, "--config", str(file), "--max-num-seqs", "3", "--no-self-check", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["firsttoken", "config", "show", *words, "--api-key", "secret"])
    told = show(capsys, *words)
    assert told["trouble"] is None
    parser = build_parser().parse_args(["serve"]).parser
    assert told.keys() - {"trouble"} == set(keys_of(parser)), "every option, and nothing else"
    expected = {
        "model": (MODEL, "flag", ""),
        "max-num-seqs": (3, "flag", "--max-num-seqs"),
        "self-check": (False, "flag", "--no-self-check"),
        "kv-memory": (8 << 20, "file", str(file)),
        "otlp-endpoint": ("http://***@c:4318", "file", str(file)),
        "api-key": (["***"], "environment", "FIRSTTOKEN_API_KEY"),
        "otlp-protocol": ("grpc", "environment", "OTEL_EXPORTER_OTLP_PROTOCOL"),
        "port": (8000, "default", ""),
        "served-model-name": (MODEL, "resolved", ""),
    }
    for name, (value, source, origin) in expected.items():
        one = told[name]
        assert (one["value"], one["source"], one["origin"]) == (value, source, origin)
    assert (told["dtype"]["source"], told["kv-dtype"]["why"]) == ("resolved", "as the activations")
    assert (told["max-model-len"]["value"], told["max-model-len"]["source"]) == ("512", "resolved")
    assert (told["device"]["source"], told["device"]["value"]) == ("flag", "cpu")


def test_what_an_engine_would_refuse_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    told = show(capsys, MODEL, "--max-model-len", "1000000", code=1)
    assert "max_model_len must be 1 to" in str(told["trouble"])
    assert told["max-model-len"]["value"] == 1000000
    told = show(capsys, "./no-such-model", code=1)
    assert "no-such-model" in str(told["trouble"])


def test_it_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    folder = "/var/lib/" + "a-long-name/" * 8
    assert main(["config", "show", MODEL, "--api-key", "hush", "--device", "cpu", "--flight-dir", folder]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    lines = {name: " ".join(rest) for name, *rest in rows}
    assert lines["flight-dir"] == f"{folder} flag --flight-dir"
    assert lines["port"] == "8000 default"
    assert lines["api-key"] == "*** flag --api-key"
    assert lines["kv-disk"] == "- default"
    assert lines["deterministic"] == "off default"
    assert lines["max-model-len"].startswith("512 resolved: the model's own")


def test_a_variable_that_is_wrong_ends_the_server_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTTOKEN_MODLE", "x")
    assert main(["serve"]) == 2
    assert "did you mean FIRSTTOKEN_MODEL?" in capsys.readouterr().err
