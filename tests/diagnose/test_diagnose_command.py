"""``firsttoken diagnose`` as its user sees it."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from firsttoken.cli import diagnose
from firsttoken.cli import main as cli
from firsttoken.diagnose.histogram import histogram
from tests.diagnose.double import Double

QUICK = ["--requests", "5", "--pause", "1ms", "--sweep-prompts", "16,64", "--sweep-concurrency", "1,2"]
SMALL = [*QUICK, "--max-tokens", "6", "--prompt-tokens", "20"]


def test_the_object(capsys) -> None:
    with Double(think_ms=20, first_ms=5, gap_ms=3, end_ms=2).running() as double:
        assert cli.main(["diagnose", double.url, *SMALL, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    phases = result["phases"]
    assert list(phases) == ["dns", "tcp", "tls", "ttfb", "first_token", "gaps", "transfer", "total"]
    assert all({"mean", "p50", "p95", "p99"} <= figures.keys() for figures in phases.values())
    assert sum(phases[name]["mean"] for name in phases if name != "total") == pytest.approx(phases["total"]["mean"])
    assert result["server"] is None
    assert result["bottleneck"].keys() >= {"layer", "cause", "evidence", "advice"}
    assert result["targets"] == {}
    assert len(result["samples"]) == result["requests"]["ok"] == 5
    assert all(len(sample["gaps_ms"]) == 5 for sample in result["samples"])
    assert result["itl_ms"]["p50"] == pytest.approx(3, abs=2)


@pytest.mark.parametrize(("target", "code"), [("10s", 0), ("1ms", 1)])
def test_targets_are_the_exit_code(target: str, code: int, capsys) -> None:
    with Double(think_ms=5).running() as double:
        argv = ["diagnose", double.url, *SMALL, "--no-sweep", "--ttft-p99", target, "--e2e-p99", "10s"]
        assert cli.main(argv) == code
    out = capsys.readouterr().out
    assert "target ttft_ms p99 <= " in out
    assert ("MISSED" in out) == (code == 1)


def test_the_table_and_the_pictures(capsys) -> None:
    with Double(think_ms=20, gap_ms=3, tokens=6).running() as double:
        assert cli.main(["diagnose", double.url, *SMALL]) == 0
    out = capsys.readouterr().out
    for words in (
        "5 of 5 requests answered",
        "waterfall of the mean request",
        "gaps between tokens (25)",
        "sweep: fixed cost of a request ",
    ):
        assert words in out
    assert "bottleneck: service, batch_window" in out
    assert max(map(len, out.splitlines())) <= 110


class Page(HTMLParser):
    """Tags that are not closed, and every address that the page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "line", "rect") or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_escapes_what_the_server_says(tmp_path, capsys) -> None:
    file = tmp_path / "report.html"
    with Double(think_ms=5, gap_ms=3, headers=("X-Request-Id: <script>alert(1)</script>",)).running() as double:
        argv = ["diagnose", double.url, *SMALL, "--model", "<script>alert(2)</script>", "--html", str(file)]
        assert cli.main(argv) == 0
    text = file.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.fetched == []
    assert "script" not in page.tags
    assert page.tags.count("svg") == 2
    assert "&lt;script&gt;alert(2)" in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["ftp://example.com"], "is not a server's address"),
        (["http://127.0.0.1:1", "--gpu", "h200"], "--gpu and --parameters belong together"),
        (["http://127.0.0.1:1", "--gpu", "abacus"], "is not known: name one of h200"),
        (["127.0.0.1:8000/v1"], "did you mean http://127.0.0.1:8000/v1?"),
        (["http://127.0.0.1:1", "--api-key", "a\nb"], "--api-key holds signs"),
        (["https://127.0.0.1:1", "--ca-file", "/nowhere.pem"], "--ca-file /nowhere.pem: No such file"),
    ],
)
def test_bad_usage(argv: list[str], words: str, capsys) -> None:
    assert cli.main(["diagnose", *argv]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["--sweep-prompts", "0"], ["--sweep-concurrency", "1,9999"], ["--parameters", "many"], ["--requests", "0"]]
)
def test_options_that_cannot_be(argv: list[str], capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["diagnose", "http://127.0.0.1:1", *argv])
    assert argv[0] in capsys.readouterr().err


def test_a_server_that_is_not_there(capsys) -> None:
    assert cli.main(["diagnose", "http://127.0.0.1:1"]) == 1
    assert "connecting: 127.0.0.1 port 1: Connection refused" in capsys.readouterr().err


@pytest.mark.parametrize("model", [[], ["--model", "double"]])
@pytest.mark.parametrize(
    ("status", "key", "words"),
    [
        (401, [], "asks for a key (401): give it with --api-key"),
        (401, ["--api-key", "bad"], "refuses this key (401): no cheese; give the right one with --api-key"),
        (403, ["--api-key", "bad"], "refuses this key (403)"),
        (404, [], "answered 404: no cheese. Is this the API's address"),
        (429, [], "turned the request away (429): no cheese"),
    ],
)
def test_a_refusal_is_told_as_one(status: int, key: list[str], words: str, model: list[str], capsys) -> None:
    with Double(mode="refusal", refuses_with=status).running() as double:
        assert cli.main(["diagnose", double.url, *SMALL, *key, *model]) == 1
    told = capsys.readouterr().err
    assert words in told
    assert "waiting for" not in told
    assert told.startswith("firsttoken diagnose: error: ")


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch, capsys) -> None:
    monkeypatch.setattr(diagnose, "_LINE_EVERY_S", 0.1)
    with Double(think_ms=30).running() as double:
        assert cli.main(["diagnose", double.url, *SMALL, "--no-sweep"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 4
    assert all(line.startswith("0 s: ") for line in lines)


def test_the_key_is_sent_and_not_shown(capsys) -> None:
    with Double().running() as double:
        cli.main(["diagnose", double.url, *SMALL, "--no-sweep", "--json", "--api-key", "s3cret"])
    assert "s3cret" not in capsys.readouterr().out


def test_bins_hold_every_gap_once() -> None:
    gaps = [0.0, 0.001, 0.5, 7.0, 7.1, 900.0]
    bins = histogram(gaps)
    assert sum(one.count for one in bins) == len(gaps)
    assert len(bins) <= 33
    for gap in gaps[2:]:
        assert sum(one.count for one in bins if one.low_ms <= gap * (1 + 1e-9) < one.high_ms) >= 1
    assert histogram([]) == []
