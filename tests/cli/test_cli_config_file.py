from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from firsttoken.cli import serve
from firsttoken.cli.config_file import keys_of
from firsttoken.cli.main import build_parser, main
from firsttoken.cli.options import ENGINE_OPTIONS, engine_args
from firsttoken.cli.sources import server_config, settle
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError
from firsttoken.core.targets_file import read_targets
from firsttoken.server.config import ServerConfig


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    serve.add_arguments(made)
    return made


def options(tmp_path: Path, text: str, *flags: str, name: str = "serve.toml") -> argparse.Namespace:
    file = tmp_path / name
    file.write_text(text)
    given = build_parser().parse_args(["serve", "--config", str(file), *flags])
    settle(given, parser(), {})
    return given


def test_config_file_ranks_below_flags(tmp_path: Path) -> None:
    text = 'model = "m"\nport = 9000\nmax-num-seqs = 4\nkv_memory = "1GiB"\napi-key = "k"\nhost = "::1"\n'
    given = options(tmp_path, text, "--port", "9001", "--max-num-seqs", "5")
    assert server_config(given) == ServerConfig(host="::1", port=9001, api_keys=("k",))
    assert engine_args(given) == EngineArgs(model="m", max_num_seqs=5, kv_memory=1 << 30)


KEYS = str(Path(__file__).parent / "keys.txt")
TARGETS = str(Path(__file__).parent / "targets.toml")
# A value for each key, and the field and value that it becomes.
VALUES: dict[str, tuple[str, str, Any]] = {
    "model": ('"m"', "model", "m"),
    "host": ('"::1"', "host", "::1"),
    "port": ("0", "port", 0),
    "api-key": ('["a", "b"]', "api_keys", ["a", "b"]),
    "allow-origin": ('["http://a.b", "http://c.d:1"]', "allow_origin", ["http://a.b", "http://c.d:1"]),
    "api-key-file": (f'"{KEYS}"', "api_key_file", KEYS),
    "ssl-certfile": ('"/x"', "ssl_certfile", "/x"),
    "ssl-keyfile": ('"/x"', "ssl_keyfile", "/x"),
    "max-body-bytes": ('"1MiB"', "max_body_bytes", 1 << 20),
    "max-messages": ("7", "max_messages", 7),
    "max-prompts": ("7", "max_prompts", 7),
    "max-request-cost": ("7", "max_request_cost", 7),
    "tool-parser": ('"none"', "tool_parser", "none"),
    "reasoning-parser": ('"none"', "reasoning_parser", "none"),
    "responses-store": ("0", "responses_store", 0),
    "audit-log": ('"/x"', "audit_log", "/x"),
    "audit-content": ("true", "audit_content", True),
    "max-connections": ("7", "max_connections", 7),
    "max-connections-per-ip": ("7", "max_connections_per_ip", 7),
    "drain-s": ("2", "drain_s", 2.0),
    "server": ('"granian"', "server", "granian"),
    "engine-restarts": ("0", "engine_restarts", 0),
    "engine-hung-s": ("60", "engine_hung_s", 60.0),
    "prompt-templates": ('"x.jsonl"', "prompt_templates", "x.jsonl"),
    "raw-control-tokens": ('"text"', "raw_control_tokens", "text"),
    "otlp-endpoint": ('"http://c:4318"', "otlp_endpoint", "http://c:4318"),
    "otlp-protocol": ('"grpc"', "otlp_protocol", "grpc"),
    "log-level": ('"debug"', "log_level", "debug"),
    "log-format": ('"json"', "log_format", "json"),
    "served-model-name": ('"x"', "served_model_name", "x"),
    "device": ('"cpu"', "device", "cpu"),
    "dtype": ('"float32"', "dtype", "float32"),
    "quantization": ('"none"', "quantization", "none"),
    "kv-dtype": ('"bfloat16"', "kv_dtype", "bfloat16"),
    "kv-memory": ("4096", "kv_memory", 4096),
    "kv-host-memory": ("4096", "kv_host_memory", 4096),
    "kv-disk": ('"/x"', "kv_disk", "/x"),
    "kv-disk-size": ("4096", "kv_disk_size", 4096),
    "kv-eviction": ('"lru"', "kv_eviction", "lru"),
    "flight-dir": ('"/x"', "flight_dir", "/x"),
    "prefix-caching": ("false", "prefix_caching", False),
    "deterministic": ("true", "deterministic", True),
    "offline": ("true", "offline", True),
    "revision": ('"v2"', "revision", "v2"),
    "pooling": ('"mean"', "pooling", "mean"),
    "chat-template": ('"x.jinja"', "chat_template", "x.jinja"),
    "self-check": ("false", "self_check", False),
    "seed": ("-5", "seed", -5),
    "batch-window": ('"adaptive"', "batch_window", "adaptive"),
    "targets": (f'"{TARGETS}"', "targets", read_targets(TARGETS)),
} | {
    name: ("7", name.replace("-", "_"), 7)
    for name in (
        "max-model-len",
        "max-num-seqs",
        "prefill-tokens",
        "mixed-prefill-tokens",
        "in-flight",
        "threads",
        "engine-core",
    )
}


NEEDED = {
    "audit-content": 'audit-log = "/x"\n',
    "ssl-keyfile": 'ssl-certfile = "/x"\n',
    "targets": 'api-key = "dashboard=k"\n',
    "kv-disk": "kv-host-memory = 4096\n",
    "kv-disk-size": 'kv-disk = "/x"\nkv-host-memory = 4096\n',
}


@pytest.mark.parametrize("key", keys_of(parser()))
def test_every_flag_is_a_key(key: str, tmp_path: Path) -> None:
    text, name, value = VALUES[key]
    more = NEEDED.get(key, "")
    given = options(tmp_path, f"{key} = {text}\n{more}")
    assert getattr(given, name) == value
    server_config(given)
    engine_args(given)


def test_the_keys_are_the_flags_and_the_model() -> None:
    told = parser().format_help()
    keys = set(keys_of(parser()))
    assert all(f"--{key}" in told for key in keys - {"model"})
    assert {name.replace("_", "-") for name in ENGINE_OPTIONS} <= keys
    assert {name.replace("_", "-").replace("api-keys", "api-key") for name in ServerConfig.__struct_fields__} <= keys
    assert not {"help", "config", "no-offline"} & keys


def test_an_unknown_key_is_told_all_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as told:
        options(tmp_path, "colour = 1")
    known = str(told.value).partition("unknown option 'colour'; known are ")[2]
    assert known.split(", ") == sorted(keys_of(parser()))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port = ", "is not valid TOML"),
        ("[serve]\nport = 1", "[serve] is a table: keys are not in tables"),
        ("[[port]]\nx = 1", "[port] is a table: keys are not in tables"),
        ("port = 'x'", 'port = "x": expected a whole number, without quotes'),
        ("port = true", "port = true: expected a whole number"),
        ("port = 70000", "port = 70000: 70000 is not a port"),
        ("max-num-seqs = 1.5", "max-num-seqs = 1.5: expected a whole number"),
        ("threads = 0", "threads = 0: 0 is too small: it must be 1 or more"),
        ("kv-memory = 'lots'", "kv-memory = \"lots\": 'lots' is not a size"),
        ("kv-memory = 1.5", 'kv-memory = 1.5: expected a size, as in "2GiB"'),
        ("offline = 'yes'", 'offline = "yes": expected true or false'),
        ("log-format = 1", 'log-format = 1: expected one of "text", "json"'),
        ("log-level = 'loud'", 'log-level = "loud": expected one of "debug", "info"'),
        ("dtype = ['auto']", 'dtype = ["auto"]: expected one of "auto"'),
        ("drain-s = '3'", 'drain-s = "3": expected a number, without quotes'),
        ("host = 1", "host = 1: expected text in quotes"),
        ("host = 1979-05-27", 'host = "1979-05-27": expected text in quotes'),
        ("api-key = ['secret', 1]", "api-key = ...: expected text in quotes, or a list"),
        ("kv-memory = 1\nkv_memory = 2", "kv_memory is given twice"),
    ],
)
def test_errors_say_file_key_value_and_what_was_expected(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as told:
        options(tmp_path, text)
    assert "serve.toml" in str(told.value)
    assert words in str(told.value)


def test_the_file_must_exist(tmp_path: Path) -> None:
    for name in ("missing.toml", "missing.yaml"):
        with pytest.raises(ConfigError, match=f"cannot read --config .*{name}: No such file"):
            settle(argparse.Namespace(config=tmp_path / name), parser(), {})


def test_the_helps_example_is_a_good_file(tmp_path: Path) -> None:
    lines = serve.EPILOG.partition("serve.toml, with")[2].splitlines()[1:]
    given = options(tmp_path, "\n".join(line.strip() for line in lines))
    assert server_config(given) == ServerConfig(port=9000)
    assert engine_args(given) == EngineArgs(model="org/model", kv_memory=2 << 30)


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        ("", [], ("info", False)),
        ('log-level = "error"\nlog-format = "json"', [], ("error", True)),
        (
            'log-level = "error"\nlog-format = "json"',
            ["--log-level", "debug", "--log-format", "text"],
            ("debug", False),
        ),
    ],
)
def test_the_servers_logging_is_set_up_by_the_file_too(
    text: str, flags: list[str], expected: tuple[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stub: Any
) -> None:
    seen: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        "firsttoken.cli.options.setup_logging", lambda level, *, json_lines: seen.append((level, json_lines))
    )
    monkeypatch.setattr("firsttoken.server.run.serve", lambda *_: 0)
    file = tmp_path / "serve.toml"
    file.write_text("port = 0\n" + text)
    assert main(["serve", "--config", str(file), *flags]) == 0
    assert seen[-1] == expected
    assert not stub.engines[0].alive(), "an engine that nobody stopped ends with its command"


def test_a_yaml_file_says_the_same(tmp_path: Path) -> None:
    text = "model: m\nport: 9000\nkv-memory: 1GiB\nprefix_caching: false\napi-key:\n  - a\n  - b\ndrain-s: 5\n"
    given = options(tmp_path, text, "--port", "9001", name="serve.yaml")
    assert server_config(given) == ServerConfig(port=9001, api_keys=("a", "b"), drain_s=5)
    assert engine_args(given) == EngineArgs(model="m", kv_memory=1 << 30, prefix_caching=False)
    assert not hasattr(options(tmp_path, "# nothing\n", name="serve.yml"), "port")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: [", "is not valid YAML"),
        ("- port", "must hold keys and values, as in port: 9000"),
        ("1: 2", "unknown option 1; known are"),
        ("serve:\n  port: 1", "[serve] is a table"),
        ("prot: 1", "did you mean port?"),
        ("tensor_parallel_size: 2", "unknown option 'tensor_parallel_size' (vLLM's option: one GPU is used)"),
        ("host: 2026-12-01", "expected text in quotes"),
        ("port: !!python/object/apply:os.system [exit]", "is not valid YAML"),
    ],
)
def test_errors_of_a_yaml_file(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as told:
        options(tmp_path, text, name="serve.yaml")
    assert "serve.yaml" in str(told.value)
    assert words in str(told.value)
