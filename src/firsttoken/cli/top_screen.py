"""The terminal's picture of a server: what fits into the lines there are, the most important first."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from firsttoken.cli.top_state import STEPS_MS, LiveState
from firsttoken.core.outcome import NOT_SERVED
from firsttoken.core.service import CLASS_NAMES

_RAMP = " ▁▂▃▄▅▆▇█"
_CLASS_STYLES = {"p0": "dark_orange3", "p1": "blue", "p2": "cyan"}
_KIND_STYLES = {"decode": "blue", "prefill": "yellow", "mixed": "magenta"}
_STATE_STYLES = {"idle": "green", "busy": "green", "draining": "yellow", "restarting": "yellow"}
_BAD_STYLE = "bold red"  # stuck, dead, not connected
_LEVELS = ("p50", "p95", "p99")
_LABEL = 10
_WIDE, _NARROW = 110, 76
_MIB = 1 << 20


def picture(state: LiveState, width: int, height: int | None, trouble: str | None = None) -> RenderableType:
    """Everything in at most ``height`` lines (None: as many as it takes). ``trouble`` is what is wrong with the
    connection; what is shown is then the last that was known."""
    if not state.frames:
        return Text(trouble or "connecting")
    parts: list[Text | Table] = [_head(state, width, connected=trouble is None)]
    if trouble is not None or state.frame["error"]:
        parts.append(Text(_cut(trouble or state.frame["error"], width), style="bold red"))
    parts += [_now(state, width), Text(), _latency(state, width), Text()]
    left = 1000 if height is None else height - len(parts) - len(CLASS_NAMES)
    for block, lines in _blocks(state, width):
        if lines - 1 <= left:  # the blank below it may be cut off
            parts += [*block]
            left -= lines
    if left > 2:
        parts += [_requests(state, min(left - 1, 10 if height is None else left), width)]
    return Group(*parts)


def _blocks(state: LiveState, width: int) -> list[tuple[list[Text | Table], int]]:
    """Parts with the lines they take, in the order in which they get room."""
    found: list[list[Text]] = [_lines(state, width), _steps(state, width), _kv(state, width), _heat(state, width)]
    return [([*block, Text()], len(block) + 1) for block in found if block]


def _head(state: LiveState, width: int, *, connected: bool) -> Text:
    engine, frame = state.engine, state.frame
    health = frame["state"] if connected else "not connected"
    clock = time.strftime("%H:%M:%S", time.localtime(frame["unix_ms"] / 1e3))
    text = Text("firsttoken ", style="bold")
    text.append(health, style=_STATE_STYLES.get(health, _BAD_STYLE))
    if engine:
        text.append(f"  {engine['model']} on {engine['device']}, {engine['dtype']}", style="default not bold")
    text.truncate(max(width - len(clock) - 1, 0), overflow="ellipsis", pad=True)
    return text.append(f" {clock}", style="dim not bold")


def _now(state: LiveState, width: int) -> Text:
    frame, rates = state.frame, state.frame["rates"]
    kv = frame["kv_blocks"]
    slots = f" of {state.engine['max_num_seqs']}" if state.engine else ""
    pairs = [
        ("requests/s", number(rates["requests_per_s"])),
        ("tokens/s", number(rates["output_tokens_per_s"])),
        ("running", f"{frame['running']}{slots}"),
        ("waiting", str(frame["waiting"])),
        ("KV", percent(kv["used"] / kv["total"]) if kv["total"] else "-"),
        ("not served", str(sum([frame["outcomes"][how] for how in NOT_SERVED]))),
        ("steps/s", number(rates["steps_per_s"])),
        ("tokens/step", number(rates["tokens_per_step"])),
    ]
    text = Text()
    for name, value in pairs:
        if text.cell_len + len(name) + len(value) + 3 > width:
            break
        text.append(f"{name} ", style="dim").append(f"{value}  ", style="bold")
    return text


def _latency(state: LiveState, width: int) -> Table:
    """Percentiles of the last minute by class: five lines. Narrow, it leaves out what the line above has for all."""
    table = Table(box=None, padding=(0, 2 if width >= _NARROW else 1, 0, 0), header_style="dim", show_edge=False)
    table.add_column("in ms", no_wrap=True)
    kinds = (("ttft_ms", "TTFT"), ("itl_ms", "ITL"), ("e2e_ms", "E2E"))
    levels = _LEVELS if width >= _WIDE else ("p50", "p99")
    for _, name in kinds:
        for level in levels:
            table.add_column(f"{name} {level}" if level == "p50" else level, justify="right", no_wrap=True)
    queued = {"run": "running", "wait": "waiting", "req/s": "requests_per_s", "tok/s": "tokens_per_s"}
    if width < _WIDE:
        queued = {name: queued[name] for name in ("wait", "tok/s")}
    for name in queued:
        table.add_column(name, justify="right", no_wrap=True)
    for name in CLASS_NAMES:
        told = state.frame["classes"][name]
        cells = [number(told[kind][level]) for kind, _ in kinds for level in levels]
        queue = [number(told.get(key)) for key in queued.values()]
        table.add_row(Text(name, style=_CLASS_STYLES[name]), *cells, *queue)
    return table


def _lines(state: LiveState, width: int) -> list[Text]:
    found = []
    for name, values in state.lines.items():
        last = values[-1]
        shown = milliseconds(last) if name.endswith("p99") else number(last)
        room = max(width - _LABEL - 10, 1)
        text = Text(f"{name:<{_LABEL}}", style="dim").append(f"{shown:>8} ", style="default not dim")
        found.append(text.append(spark(list(values)[-room:]), style="cyan not dim"))
    return found


def _steps(state: LiveState, width: int) -> list[Text]:
    """The last ten seconds, a column a slice: as high as its longest step, in the colour of its kind."""
    room = max(width - _LABEL - 1, 10)
    now, slices = state.frame["now_ms"], [(0.0, "decode", False)] * room
    for bar in state.bars:
        first, last = (int((bar[edge] - now + STEPS_MS) / STEPS_MS * room) for edge in ("start", "end"))
        held = bar["gc"] > 0 or bar["run_queue"] > 1
        for at in range(max(first, 0), min(last, room - 1) + 1):
            longest, kind, before = slices[at]
            mine = bar["longest"] >= longest
            slices[at] = (max(longest, bar["longest"]), _kind(bar) if mine else kind, held or before)
    most = max((longest for longest, _, _ in slices), default=0.0)
    text = Text(f"{'steps':<{_LABEL}} ", style="dim")
    for longest, kind, _ in slices:
        # By the root, as on the page: usual steps stay visible beside a long one.
        level = math.ceil(math.sqrt(longest / most) * (len(_RAMP) - 1)) if longest else 0
        text.append(_RAMP[level], style=f"{_KIND_STYLES[kind]} not dim")
    legend = Text(f"{'':<{_LABEL}} highest {milliseconds(most)}, last 10 s: ", style="dim")
    for kind, style in _KIND_STYLES.items():
        legend.append(f"{kind} ", style=f"{style} not dim")
    held = sum(held for _, _, held in slices)
    if held:
        legend.append(f" {held} held up by gc or another program", style="red not dim")
    legend.truncate(width, overflow="ellipsis")
    return [text, legend]


def _kind(bar: dict[str, Any]) -> str:
    if not bar["prefill_tokens"]:
        return "decode"
    return "mixed" if bar["decode_rows"] else "prefill"


def _kv(state: LiveState, width: int) -> list[Text]:
    blocks, kv = state.frame["kv_blocks"], state.kv
    total = blocks["total"] or 1
    found = [
        _bar("KV device", [(blocks["used"] / total, "blue"), (blocks["cached"] / total, "cyan")], width)
        .append(f" in use {percent(blocks['used'] / total)}, cached {percent(blocks['cached'] / total)}")
        .append(_hit_words(kv, "device"))
    ]
    if kv and kv["restores"]:
        told = kv["restores"]
        share = told["host_blocks"] / (told["host_capacity"] or 1)
        size = told["host_blocks"] * kv["bytes_per_block"] / _MIB
        done = told["restores"] - told["cancelled"]
        wait = f", restores wait {milliseconds(told['restore_s'] * 1e3 / done)}" if done > 0 else ""
        found.append(
            _bar("KV host", [(share, "cyan")], width).append(f" {size:,.0f} MiB").append(_hit_words(kv, "host") + wait)
        )
    if kv and kv["disk"]:
        told = kv["disk"]
        share = told["nbytes"] / (told["cap_bytes"] or 1)
        found.append(
            _bar("KV files", [(share, "cyan")], width)
            .append(f" {told['nbytes'] / _MIB:,.0f} MiB")
            .append(_hit_words(kv, "disk"))
        )
    for text in found:
        text.truncate(width, overflow="ellipsis")
    return found


def _bar(name: str, shares: Sequence[tuple[float, str]], width: int) -> Text:
    room = max(min(width // 3, 40), 8)
    text = Text(f"{name:<{_LABEL}} ", style="dim")
    drawn = 0
    for share, style in shares:
        cells = min(round(share * room), room - drawn)
        text.append("█" * cells, style=f"{style} not dim")
        drawn += cells
    return text.append("·" * (room - drawn))


def _hit_words(kv: dict[str, Any] | None, tier: str) -> str:
    if not kv or not kv["hits"]:
        return ""
    told = [kv["hits"][name][tier] for name in CLASS_NAMES]
    asked, found = sum(one["asked"] for one in told), sum(one["found"] for one in told)
    return f", found {percent(found / asked)}" if asked else ""


def _heat(state: LiveState, width: int) -> list[Text]:
    """Rows of tiers, columns of token positions, since the start: the share of prompt tokens that was found."""
    kv = state.kv
    if not kv or not kv["heat"]:
        return []
    context = state.engine.get("max_model_len", math.inf)
    edges = [edge for edge in kv["heat"]["positions"] if edge < context][: max((width - _LABEL - 1) // 6, 1)]
    tokens = kv["heat"]["tokens"]
    kinds = list(tokens[CLASS_NAMES[0]])
    head = Text(f"{'found at':<{_LABEL}} ", style="dim")
    for edge in edges:
        head.append(f"{f'{edge // 1024}k' if edge >= 1024 else edge!s:>5} ")
    rows = [head]
    for kind in kinds[:-1]:
        row = Text(f"{'  ' + kind:<{_LABEL}} ", style="dim")
        for column in range(len(edges)):
            whole = sum(tokens[name][each][column] for name in CLASS_NAMES for each in kinds)
            share = sum(tokens[name][kind][column] for name in CLASS_NAMES) / whole if whole else None
            row.append(f"{'-' if share is None else f'{share * 100:.0f} %':>5} ", style=_heat_style(share))
        rows.append(row)
    return rows


def _heat_style(share: float | None) -> str:
    if share is None:
        return "dim"
    for least, style in ((0.75, "white on dark_blue"), (0.5, "white on blue"), (0.25, "black on steel_blue1")):
        if share >= least:
            return f"{style} not dim"
    return "not dim"


def _requests(state: LiveState, most: int, width: int) -> Table:
    """The latest that ended, newest first."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    table.add_column("latest requests", no_wrap=True, overflow="ellipsis", max_width=max(width - 52, 12))
    table.add_column("class", no_wrap=True)
    for name in ("in", "out", "TTFT", "E2E"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ended", no_wrap=True, overflow="ellipsis")
    for one in list(reversed(state.requests))[:most]:
        ended = one["finish_reason"] if one["outcome"] == "finished" else one["outcome"]
        table.add_row(
            Text(one["id"]),
            Text(one["service_class"], style=_CLASS_STYLES.get(one["service_class"], "")),
            f"{one['prompt_tokens']:,}",
            f"{one['output_tokens']:,}",
            milliseconds(one["ttft_ms"]),
            milliseconds(one["total_ms"]),
            Text(str(ended), style="" if one["outcome"] == "finished" else "yellow"),
        )
    return table


def spark(values: Sequence[float]) -> str:
    """One character a value, from 0 up to the highest; a blank for none (NaN)."""
    most = max((value for value in values if not math.isnan(value)), default=0.0)
    return "".join(" " if math.isnan(value) else _level(value, most) for value in values)


def _level(value: float, most: float) -> str:
    return _RAMP[1] if most <= 0 or value <= 0 else _RAMP[max(1, math.ceil(value / most * (len(_RAMP) - 1)))]


def number(value: float | None) -> str:
    """In few characters; a dash for none."""
    if value is None or math.isnan(value):
        return "-"
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def milliseconds(value: float | None) -> str:
    """With the unit, in few characters; a dash for none."""
    if value is None or math.isnan(value):
        return "-"
    if value >= 10_000:
        return f"{value / 1e3:.1f} s"
    return f"{value / 1e3:.2f} s" if value >= 1000 else f"{number(value)} ms"


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
