"""How well ``firsttoken diagnose`` names faults and times phases: ``python -m benchmarks.diagnose``.

Faults are those of made-up servers (tests/diagnose/mixtures.py), phases those of a server on this machine whose delays
are known (tests/diagnose/double.py); where curl and openssl are, the same server is timed by curl as well.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from firsttoken.cli.bench_options import write_result
from firsttoken.cli.report import cpu_name, header
from firsttoken.core.tls import client_context
from firsttoken.diagnose.endpoint import Endpoint
from firsttoken.diagnose.evidence import gather
from firsttoken.diagnose.probe import Ask, Probe
from firsttoken.diagnose.verdict import LAYERS, verdict
from firsttoken.observability.percentiles import percentile
from tests.diagnose.double import Double, own_process
from tests.diagnose.mixtures import costs, measured, mixture

DELAYS = {"tls_ms": 60.0, "think_ms": 40.0, "first_ms": 25.0, "gap_ms": 5.0, "end_ms": 10.0}
_CURL = ("namelookup", "connect", "appconnect", "pretransfer", "starttransfer", "total")


def faults_named(mixtures: int) -> dict[str, Any]:
    """Shares of mixtures whose costliest fault, and its layer, were named; ``expected`` where the truth is what the
    fault costs on the average, not what it cost these 20 requests. ``within_5_percent`` of the wrong ones were ties."""
    right: Counter[str] = Counter()
    worst: Counter[str] = Counter()
    for seed in range(mixtures):
        server, faults = mixture(seed)
        cost = costs(server, faults, seed)
        on_average = costs(server, faults, seed, 400)
        named = verdict(gather(measured(server, seed)), server.reference)[0].cause
        true = max(cost, key=lambda fault: cost[fault])
        worst[true] += 1
        right["cause"] += named == true
        right["layer"] += LAYERS[named] == LAYERS[true]
        right["cause_expected"] += named == max(on_average, key=lambda fault: on_average[fault])
        right["within_5_percent"] += named != true and cost.get(named, 0.0) > 0.95 * cost[true]
    return {"mixtures": mixtures, "costliest": dict(worst), **{name: right[name] / mixtures for name in sorted(right)}}


def delays_found(requests: int) -> dict[str, Any]:
    """ms of each phase as the server noted it and as it was measured: medians, and of the pairs' differences."""
    double = Double(think_ms=40.0, first_ms=25.0, gap_ms=5.0, end_ms=10.0)
    with double.running():
        probe = Probe(Endpoint.parse(double.url), None, timeout_s=20)
        samples = [probe.once(Ask("double", "a few words", 8, f"bench-{number}")) for number in range(requests)]
    found = {}
    for phase in double.took[0]:
        pairs = [(one.phases[phase], took[phase]) for one, took in zip(samples, double.took, strict=True)]
        found[phase] = {
            "measured": statistics.median(ours for ours, _ in pairs),
            "true": statistics.median(true for _, true in pairs),
            "difference": statistics.median(ours - true for ours, true in pairs),
        }
    return found


def beside_curl(requests: int) -> dict[str, Any] | None:
    """Phases over TLS as we and curl measured them in turns, at the fastest tenth and the median."""
    if shutil.which("curl") is None or shutil.which("openssl") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        key, file = Path(folder) / "key.pem", Path(folder) / "certificate.pem"
        command = (
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
        )
        names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(file)]
        subprocess.run([*command.split(), *names], check=True, capture_output=True)
        pairs: dict[str, list[tuple[float, float]]] = {}
        with own_process(file, key, **DELAYS) as port:
            probe = Probe(Endpoint.parse(f"https://127.0.0.1:{port}"), client_context(str(file)), timeout_s=20)
            for number in range(requests):
                one = probe.once(Ask("double", "a few words", 8, f"bench-{number}"))
                for phase, other in _curls(probe, file).items():
                    pairs.setdefault(phase, []).append((one.phases.get(phase, one.total_ms), other))
    return {
        phase: {
            name: {"ours": percentile(ours, share), "curl": percentile(curls, share)}
            for name, share in (("p10", 0.1), ("p50", 0.5))
        }
        for phase, both in pairs.items()
        for ours, curls in [(sorted(one for one, _ in both), sorted(other for _, other in both))]
    }


def _curls(probe: Probe, certificate: Path) -> dict[str, float]:
    wanted = " ".join(f"%{{time_{stamp}}}" for stamp in _CURL)
    curl = ["curl", "-s", "--http1.1", "-o", "/dev/null", "-w", wanted, "--cacert", str(certificate)]
    body = probe.dialect.body("double", "a few words", 8)
    command = [*curl, "-d", body.decode(), f"{probe.endpoint}/v1/chat/completions"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=20)
    name, tcp, tls, ready, first, total = (float(word) * 1e3 for word in done.stdout.split())
    return {"tcp": tcp - name, "tls": tls - tcp, "ttfb": first - ready, "total": total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixtures", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/cpu/diagnose.json"))
    options = parser.parse_args()
    result = {
        **header(command="python -m benchmarks.diagnose", device_name=cpu_name()),
        "faults": [faults_named(count) for count in sorted({200, options.mixtures})],
        "delays_ms": delays_found(options.requests),
        "curl_ms": beside_curl(options.requests),
    }
    write_result(options.output, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
