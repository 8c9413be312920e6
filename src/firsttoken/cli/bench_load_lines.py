"""The results of ``firsttoken bench load`` for people."""

from __future__ import annotations

from typing import Any

from firsttoken.cli.bench_options import percentile_lines

# A client that was late by more, in ms and as a share of the median TTFT, is warned of.
LATE_MS = 3.0
LATE_SHARE = 0.03


def load_lines(where: str, result: dict[str, Any]) -> list[str]:
    """``where`` is the device or the URL."""
    requests = result["requests"]
    lengths = f"mix {result['mix']}, seed {result['seed']}" if result["mix"] is not None else "lengths as in the trace"
    lines = [
        f"{result['model']} on {where}: {_pace(result)}, {lengths}",
        f"{requests['sent']:g} requests sent, {requests['ok']:g} ok, {requests['failed']:g} failed{_short(requests)}",
        *(f"  {count:g} x {reason}" for reason, count in requests["reasons"].items()),
        *_stopped(result),
        *percentile_lines(result),
        *_sure_lines(result),
        f"{result['requests_per_s']:.2f} requests/s, {result['output_tokens_per_s']:,.1f} output tokens/s, goodput "
        f"{result['goodput_rps']:.2f} requests/s",
    ]
    for name, found in result.get("beside", {}).items():
        lines += [f"{name}: {found['sent']:g} requests sent, {found['ok']:g} ok", *percentile_lines(found)]
    for name, target in result["targets"].items():
        verdict = "met" if target["met"] else "MISSED"
        p99 = "no answer" if target["p99"] is None else f"{target['p99']:.2f}"
        lines.append(f"target {name} p99 <= {target['target']:g}: {p99}, {verdict}")
    return [*lines, *(_client_lines(result) if "client" in result else [])]


def _stopped(result: dict[str, Any]) -> list[str]:
    stopped = result.get("stopped")
    return [f"ended before its time ({stopped}): figures are of the requests that had ended"] if stopped else []


def _pace(result: dict[str, Any]) -> str:
    if result["rate"] is not None:
        return f"{result['rate']:g} requests/s"
    if result["concurrency"] is not None:
        return f"{result['concurrency']} callers"
    if result["burst"] is not None:
        return f"bursts of {result['burst']}"
    return f"{result['trace']} x {result['scale'] or 1:g}"


def _short(requests: dict[str, Any]) -> str:
    short = requests.get("short")
    return f" ({short:g} of them ended by the server before their length)" if short else ""


def _sure_lines(result: dict[str, Any]) -> list[str]:
    if "ci95" not in result:
        return []
    found = []
    for name, share in (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("itl_ms", "p50"), ("itl_ms", "p99")):
        half = result["ci95"].get(name, {}).get(share)
        if half is not None:
            found.append(f"{name.removesuffix('_ms').upper()} {share} {result[name][share]:.2f} +- {half:.2f}")
    return [f"means of {len(result['repeats'])} runs, 95 % confidence: {', '.join(found)}"]


def _client_lines(result: dict[str, Any]) -> list[str]:
    client, tokens = result["client"], result["tokens"]
    per_token = client["cpu_us_per_token"]
    counted = ", ".join(f"{name} ({count:g})" for name, count in tokens["counted_by"].items())
    cost = "" if per_token is None else f", {per_token:.1f} us a token"
    late = f", sent late by p99 {result['late_ms']['p99']:.2f} ms" if result["late_ms"] else ""
    lag = f", loop late by p99 {client['loop_lag_ms']['p99']:.2f} ms" if client["loop_lag_ms"] else ""
    lines = [f"tokens counted by: {counted or 'nothing came'}"]
    if tokens["input_asked"]:
        lines.append(
            f"{tokens['input']:,.0f} prompt tokens in all by the server's count, {tokens['input_asked']:,.0f} asked"
        )
    return [*lines, f"this client: {client['cpu_share']:.0%} of a core{cost}{late}{lag}", *_doubts(result)]


def _doubts(result: dict[str, Any]) -> list[str]:
    """A client that was itself late has seen tokens late."""
    lag, ttft = result["client"]["loop_lag_ms"], result["ttft_ms"]
    if not lag or not ttft or lag["p99"] <= max(LATE_MS, LATE_SHARE * ttft["p50"]):
        return []
    return [
        f"WARNING: this client was itself late, by up to {lag['p99']:.1f} ms (p99): the upper percentiles are too high "
        "by as much. Something else uses its cores, or one core is too little for this load"
    ]
