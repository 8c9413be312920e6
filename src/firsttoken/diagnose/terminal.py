"""The result for a terminal: a table, a waterfall, the gaps, the verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from firsttoken.diagnose.fit import in_words
from firsttoken.diagnose.histogram import histogram
from firsttoken.diagnose.sample import PHASES

WIDTH = 100
_COLUMNS = ("mean", "p50", "p95", "p99", "max")
_BAR = 56


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Of `report.diagnosis`, with the ``url``."""
    requests = result["requests"]
    yield f"{result['url']}, model {result['model']}: {requests['ok']} of {requests['sent']} requests answered"
    for reason, count in requests["reasons"].items():
        yield from _wrapped(f"  {count} x {reason}")
    yield ""
    yield _row("ms", _COLUMNS)
    for name, figures in result["phases"].items():
        yield _row(name, _cells(figures))
    yield ""
    for name, title in (("ttft_ms", "TTFT"), ("itl_ms", "ITL"), ("tpot_ms", "TPOT")):
        if result[name]:
            yield _row(title, _cells(result[name]))
    if result["server"] is not None:
        yield ""
        yield "the server's own account"
        for name, figures in result["server"].items():
            yield _row(f"  {name}", _cells(figures))
    yield from _waterfall(result["phases"])
    yield from _gaps(result["samples"])
    yield from _facts(result["connection"], result["sweep"])
    yield from _verdict(result)


def _waterfall(phases: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Mean phases, each where it begins."""
    total = phases["total"]["mean"] or 1.0
    yield ""
    yield f"waterfall of the mean request ({total:.1f} ms)"
    begun = 0.0
    for name in PHASES:
        ms = phases[name]["mean"]
        left = round(begun / total * _BAR)
        right = max(round((begun + ms) / total * _BAR), left)
        bar = " " * left + ("█" * (right - left) or "▏")
        yield f"  {name:<12}{bar:<{_BAR + 1}} {ms:9.2f}"
        begun += ms


def _gaps(samples: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    bins = histogram([gap for sample in samples for gap in sample["gaps_ms"]])
    if not bins:
        return
    most = max(one.count for one in bins)
    yield ""
    yield f"gaps between tokens ({sum(one.count for one in bins)})"
    for one in bins:
        bar = "█" * round(one.count / most * 40) or ("▏" if one.count else "")
        yield f"  {one.low_ms:9.2f} to {one.high_ms:9.2f} ms {bar} {one.count or ''}".rstrip()


def _facts(connection: Mapping[str, Any], sweep: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    text = f"HTTP/{connection['http_version']}"
    if connection["keep_alive"] is not None:
        kept = connection["keep_alive_failed"]
        text += ", connections can be reused" if kept is None else f", connections cannot be reused: {kept}"
    if connection["reused_ttft_ms"] is not None:
        text += f" (TTFT then {connection['reused_ttft_ms']:.1f} ms)"
    if connection["rtt_ms"] is not None:
        text += f"; round trip {connection['rtt_ms']:.2f} ms"
    text += f"; {connection['retransmits']} segments sent again, {connection['out_of_order']} out of order"
    yield from _wrapped(text)
    if (tls := connection["tls"]) is not None:
        yield from _wrapped(_tls(tls, connection))
    yield from _wrapped(_slopes(sweep))


def _tls(tls: Mapping[str, Any], connection: Mapping[str, Any]) -> str:
    text = f"{tls['version']}, {tls['cipher']}"
    if tls["server_bytes"] is not None:
        text += f", {tls['server_bytes']} bytes from the server in the handshake"
    if tls["chain"] is not None:
        text += f", {tls['chain']} certificates"
    if connection["tls_resumes"] is not None:
        text += f"; sessions {'can' if connection['tls_resumes'] else 'cannot'} be resumed"
        text += f" ({connection['tls_resumed_ms']:.1f} ms)"
    return text


def _slopes(sweep: Mapping[str, Any]) -> str:
    parts = [f"{title} {words}" for title, words in in_words(sweep).items()]
    return "sweep: " + ", ".join(parts) if parts else ""


def _verdict(result: Mapping[str, Any]) -> Iterator[str]:
    bottleneck = result["bottleneck"]
    yield ""
    yield f"bottleneck: {bottleneck['layer']}, {bottleneck['cause']} ({_won(bottleneck)})"
    yield from _wrapped(f"  evidence: {bottleneck['evidence']}")
    yield from _wrapped(f"  advice: {bottleneck['advice']}")
    for finding in result["findings"][1:]:
        yield from _wrapped(f"also: {finding['layer']}, {finding['cause']} ({_won(finding)}): {finding['evidence']}")
    for note in result["notes"]:
        yield from _wrapped(f"note: {note}")
    for name, target in result["targets"].items():
        kept = "met" if target["met"] else "MISSED"
        yield f"target {name} p99 <= {target['target']:g}: {target['p99']:.2f}, {kept}"


def _won(finding: Mapping[str, Any]) -> str:
    saving = finding["saving_ms"]
    return f"{saving:.1f} ms to be won" if saving else "nothing known to be won"


def _cells(figures: Mapping[str, float]) -> list[str]:
    return [f"{figures[name]:.2f}" for name in _COLUMNS]


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<14}" + "".join(f"{cell:>11}" for cell in cells)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ", initial_indent=text[: len(text) - len(text.lstrip())])
