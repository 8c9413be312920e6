"""The Grafana dashboard against a scrape of a real engine with all three KV tiers: what it asks for is there."""

import asyncio
import os
import re
from pathlib import Path

import promql_parser
import pytest
import yaml
from benchmarks.grafana import ALERTS, DIED, expressions, read_dashboard
from prometheus_client.parser import text_string_to_metric_families

from firsttoken import AsyncEngineArgs, AsyncLLM
from firsttoken.core.service import ClassTargets, Targets
from firsttoken.engine import tiers
from firsttoken.server.app import build_app
from firsttoken.server.config import ServerConfig
from tests.server.conftest import Client

DASHBOARD = read_dashboard()
QUERIES = [one["definition"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
# Prometheus adds them to what it scrapes.
ADDED = {"instance", "job"}
TARGETS = Targets(p1=ClassTargets(ttft_p99=10_000.0, weight=2.0))


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    """Labels of all samples of a server that has served requests, by the sample's name."""
    with pytest.MonkeyPatch.context() as patch:
        # A tiny model computes sooner than anything is restored.
        patch.setattr(tiers, "recompute_cost", lambda step_time, most: lambda start, end: 1e6)
        return asyncio.run(_scrape(tmp_path_factory.mktemp("kv")))


async def _scrape(folder: Path):
    args = AsyncEngineArgs(
        model="random:tiny-llama", max_model_len=512, max_num_seqs=2, threads=1, quantization="none", dtype="float32",
        kv_host_memory=8 << 20, kv_disk=str(folder), kv_disk_size=64 << 20, targets=TARGETS,
    )  # fmt: skip
    async with await AsyncLLM.launch(args, in_process=True) as llm:
        llm.metrics.watch_engine_process(os.getpid())  # on a thread here: in a process of its own otherwise
        client = Client(build_app(llm, ServerConfig()), llm, None)
        for number in range(6):
            prompt = [[1 + (number + step * i) % 251 for i in range(401)] for step in (1, 2)]
            body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "service_tier": f"p{number % 3}"}
            assert (await client.post("/v1/completions", body)).status == 200
        async with asyncio.timeout(10):
            while llm.kv_report is None or not any(sum(one.missed) for one in llm.kv_report.tokens):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        text = (await client.get("/metrics")).body.decode()
    names: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            names.setdefault(sample.name, []).append(sample.labels)
    return names


def selectors(expression):
    """Every series that it selects, with the labels that it is grouped by on the way out."""
    found = []
    groups: list[list[str]] = []

    def before(node):
        if isinstance(node, promql_parser.AggregateExpr):
            labels = []
            if node.modifier is not None:
                assert node.modifier.type == promql_parser.AggModifierType.By
                labels = list(node.modifier.labels)
            groups.append(labels)
        elif isinstance(node, promql_parser.VectorSelector):
            found.append((node, [label for group in groups for label in group]))
        return True

    def after(node):
        if isinstance(node, promql_parser.AggregateExpr):
            groups.pop()
        return True

    promql_parser.walk(promql_parser.parse(expression), before, after)
    return found


@pytest.mark.parametrize("one", list(expressions(DASHBOARD)), ids=lambda one: f"{one.panel}: {one.text[:60]}")
def test_every_series_and_label_of_a_panel_is_in_a_scrape(scraped, one):
    assert "$" not in one.text, "a variable that nobody puts in"
    found = selectors(one.text)
    assert found
    for selector, grouped in found:
        assert selector.name in scraped, selector.name
        samples = scraped[selector.name]
        for matcher in selector.matchers.matchers:
            if matcher.name in ADDED:
                continue
            values = {labels[matcher.name] for labels in samples if matcher.name in labels}
            assert values, (selector.name, matcher.name)
            exact = matcher.op == promql_parser.MatchOp.Equal
            fits = [v for v in values if (v == matcher.value if exact else re.fullmatch(matcher.value, v))]
            assert fits, (selector.name, matcher.name, matcher.value, values)
        labels = set().union(*samples) | ADDED
        assert set(grouped) <= labels, (selector.name, grouped)
    shown = set(re.findall(r"{{(\w+)}}", one.legend))
    assert shown <= {label for _, grouped in found for label in grouped}, "a legend of a label that is added up"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_series_of_an_alert_is_in_a_scrape(scraped, rule):
    for selector, _ in selectors(rule["expr"]):
        assert selector.name in {*scraped, "up"}, selector.name
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description"}


def test_prometheus_reads_the_alerts_and_names_its_job_as_they_do():
    [config] = yaml.safe_load_all((ALERTS.parent / "prometheus.yml").read_text())
    assert config["rule_files"] == [ALERTS.name]
    assert {one["job_name"] for one in config["scrape_configs"]} == {"firsttoken"}
    assert DIED in {rule["alert"] for rule in RULES}


@pytest.mark.parametrize("query", QUERIES)
def test_variables_are_read_from_labels_that_there_are(scraped, query):
    series, label = re.fullmatch(r"label_values\((.+), (\w+)\)", query).groups()
    name = promql_parser.parse(series.replace("$instance", ".*")).name
    assert name in scraped
    assert label in ADDED or all(label in labels for labels in scraped[name])


def test_alternatives_of_a_pattern_are_all_values_that_there_are(scraped):
    """A misspelt one among several would go unseen."""
    for one in expressions(DASHBOARD):
        for selector, _ in selectors(one.text):
            for matcher in selector.matchers.matchers:
                values = {labels.get(matcher.name) for labels in scraped[selector.name]}
                if matcher.value != ".*":
                    assert set(matcher.value.split("|")) <= values, (selector.name, matcher.value, values)


def test_panels_do_not_overlap_and_have_ids_of_their_own():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in cells, panel["title"]
                cells.add((x, y))


def test_variables_that_panels_use_are_declared():
    declared = {one["name"] for one in DASHBOARD["templating"]["list"]}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            used = set(re.findall(r"\$\{?(\w+)", target["expr"] + panel["title"])) - {"__rate_interval"}
            assert used <= declared, panel["title"]
            assert target["datasource"]["uid"] == "${datasource}"


def test_panels_are_described_and_have_one_unit_each():
    for panel in DASHBOARD["panels"]:
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            sizes = ["_bytes" in one["expr"] for one in panel["targets"]]
            share = panel["fieldConfig"]["defaults"].get("unit") == "percentunit"
            assert share or len(set(sizes)) == 1, panel["title"]
