"""The files of deploy/ say what the server understands: its options, its routes, its times."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from firsttoken.checkpoint.cache import cache_folder
from firsttoken.cli.main import build_parser
from firsttoken.cli.sources import server_config, settle
from firsttoken.server.auth import OPEN_PATHS
from firsttoken.server.config import ServerConfig
from firsttoken.server.openapi.operations import OPERATIONS

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "firsttoken.service"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
MANIFEST = {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


class _Repeated(dict):
    """Of a key that stands several times all values, a line each."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self and isinstance(value, list):
            value = [*self[key], *value]
        super().__setitem__(key, value)


def unit() -> configparser.RawConfigParser:
    read = configparser.RawConfigParser(strict=False, dict_type=_Repeated, interpolation=None)
    read.optionxform = str  # type: ignore[assignment,method-assign]
    read.read_string(UNIT.read_text())
    return read


def understood(words: list[str], environ: dict[str, str], tmp_path: Path, toml: str = "") -> ServerConfig:
    """What a server makes of a command line, whose files are put in the places of those that are not here."""
    (tmp_path / "serve.toml").write_text(toml)
    (tmp_path / "api-keys").write_text("key\n")
    (tmp_path / "api-keys").chmod(0o600)
    words = [str(tmp_path / Path(word).name) if word.endswith(("serve.toml", "api-keys")) else word for word in words]
    given = build_parser().parse_args(words)
    settle(given, given.parser, {name: value for name, value in environ.items() if name.startswith("FIRSTTOKEN_")})
    return server_config(given)


def dockers() -> tuple[dict[str, str], list[str]]:
    """The image's variables and its entry point."""
    text = DOCKERFILE.replace("\\\n", " ")
    variables = dict(word.split("=", 1) for line in re.findall(r"^ENV (.*)$", text, re.M) for word in shlex.split(line))
    [entry] = re.findall(r"^ENTRYPOINT (.*)$", text, re.M)
    return variables, yaml.safe_load(entry)


def test_the_unit_starts_a_server_that_drains_within_its_time(tmp_path: Path) -> None:
    service = unit()["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program.endswith("/bin/firsttoken")
    variables = dict(word.split("=", 1) for word in shlex.split(service["Environment"].replace("\n", " ")))
    config = understood(words, variables, tmp_path)
    assert config.api_keys == ("key",)
    assert config.drain_s < int(service["TimeoutStopSec"])
    folders = [service["CacheDirectory"], service["StateDirectory"]]
    for name in ("FIRSTTOKEN_CACHE", "FIRSTTOKEN_FLIGHT_DIR", "HOME", "TRITON_CACHE_DIR"):
        assert re.match(rf"/var/(cache|lib)/({'|'.join(folders)})(/|$)", variables[name]), "the rest is read-only"
    assert (service["KillMode"], service["OOMPolicy"]) == ("mixed", "continue")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/firsttoken/bin/firsttoken", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", copy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-200:]


def test_the_image_serves_as_its_own_user_and_keeps_all_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, entry = dockers()
    assert entry[0] == "firsttoken"
    config = understood([*entry[1:], "smollm2"], variables, tmp_path)
    assert (config.host, config.port) == ("0.0.0.0", int(*re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, re.M)))
    [volume] = yaml.safe_load(*re.findall(r"^VOLUME (.*)$", DOCKERFILE, re.M))
    monkeypatch.setenv("FIRSTTOKEN_CACHE", variables["FIRSTTOKEN_CACHE"])
    for path in (str(cache_folder()), variables["FIRSTTOKEN_FLIGHT_DIR"], variables["HOME"]):
        assert (path + "/").startswith(volume + "/")
    [user] = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.M)
    assert f"--uid {user} " in DOCKERFILE
    assert all("/" not in image for image in re.findall(r"^FROM (\S+)", DOCKERFILE, re.M)), "names of Docker Hub's own"
    copied = {name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.M) for name in line.split()}
    let_in = {line[1:] for line in (DEPLOY.parent / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == let_in
    assert all((DEPLOY.parent / name).exists() for name in copied)


def test_the_pod_is_probed_and_ended_as_the_server_means_it(tmp_path: Path) -> None:
    pod = MANIFEST["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    variables, entry = dockers()
    toml = MANIFEST["ConfigMap"]["data"]["serve.toml"]
    config = understood([*entry[1:], *container["args"]], variables, tmp_path, toml)
    assert config.api_keys == ("key",)
    [port] = container["ports"]
    assert config.port == port["containerPort"]
    assert MANIFEST["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    pre_stop = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pre_stop + config.drain_s
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsUser"] == int(*re.findall(r"^USER (\d+)", DOCKERFILE, re.M))
    labels = MANIFEST["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert MANIFEST["Service"]["spec"]["selector"] == labels
    mounted = {one["mountPath"] for one in container["volumeMounts"]}
    assert {str(Path(word).parent) for word in container["args"] if word.startswith("/")} <= mounted


def test_what_is_probed_needs_no_key_and_is_there() -> None:
    [container] = MANIFEST["Deployment"]["spec"]["template"]["spec"]["containers"]
    paths = {container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    paths |= set(re.findall(r"127\.0\.0\.1:8000(/[\w/]+)", DOCKERFILE))
    assert paths == {"/health/live", "/health/ready"}
    assert paths <= OPEN_PATHS
    assert paths <= {one.path for one in OPERATIONS}
