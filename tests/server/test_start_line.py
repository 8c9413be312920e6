"""What the server says of its start."""

from __future__ import annotations

import shlex

import pytest

from firsttoken.core.service import ClassTargets, KeyRule, Targets
from firsttoken.server.start_lines import CHAT, WIDTH, promises, start_lines, start_parts, try_lines


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"interpreter": 60.4, "imports": 1000.4, "checkpoint": 40.4, "weights": 500.4, "warm_up": 90.4, "other": 3.3},
        {"imports": 0.5, "weights": 1.5, "other": 0.5},
    ],
)
def test_the_parts_that_are_shown_sum_to_the_total(engine):
    total, parts = start_parts(1911.2, engine)
    assert total == 1911
    assert sum(parts.values()) == total
    assert list(parts) == [name for name in engine if name != "other"] + ["other"]
    assert parts["other"] == pytest.approx(1911.2 - sum(ms for name, ms in engine.items() if name != "other"), abs=4)


def test_no_line_wraps_at_100_columns():
    parts = {"interpreter": 1060, "imports": 11000, "checkpoint": 1040, "weights": 50000, "warm_up": 9000, "other": 30}
    facts = [[f"fact number {index}" for index in range(count)] for count in (2, 20)]
    lines = start_lines(["title", "on url"], facts, (60000, parts))
    assert max(map(len, lines)) <= WIDTH
    assert lines[:2] == ["title on url", "  fact number 0, fact number 1"]
    text = " ".join(line.strip() for line in lines)
    assert text.endswith("ready after 60000 ms: " + ", ".join(f"{name} {ms}" for name, ms in parts.items()))


@pytest.mark.parametrize("key", [False, True])
@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://[2001:db8:85a3:1234:5678:8a2e:370:7334]:65535"])
def test_the_line_to_try_is_one_command(url, key):
    lines = try_lines(url, "chat/completions", CHAT, key=key)
    assert max(map(len, lines)) <= WIDTH
    words = shlex.split("\n".join(lines).partition("try: ")[2].replace("\\\n", ""))
    header = ["-H", "Authorization: Bearer YOUR_KEY"] if key else []
    assert words == ["curl", "-s", f"{url}/v1/chat/completions", *header, "-d", CHAT]
    trusted = try_lines(url, "chat/completions", CHAT, key=key, trust="--cacert 'my certificate.pem'")
    assert "--cacert 'my certificate.pem'" in " ".join(trusted)


def test_targets_are_told_as_far_as_a_file_gave_them():
    assert promises(Targets()) == []
    told = Targets(
        p0=ClassTargets(ttft_p99=80.0, itl_p99=20.0, max_queue=10.0),
        p2=ClassTargets(starts_within=60_000.0),
        keys={"gold": KeyRule(), "batch": KeyRule()},
    )
    assert promises(told) == [
        "class p0: first token 80 ms / gap 20 ms / queue 10 ms / start within 30 s",
        "class p2: start within 60 s",
        "rules for 2 keys",
    ]
