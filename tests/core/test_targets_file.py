"""The file of ``--targets``, and what the structs that it fills refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError, InvalidRequest
from firsttoken.core.service import CLASS_NAMES, ClassTargets, KeyRule, ServiceClass, Targets, class_named
from firsttoken.core.targets_file import parse_targets, read_targets

FULL = """
[class.p0]
ttft_p99 = "80ms"
itl_p99 = "20ms"
max_queue = "500us"
weight = 4
[class.p1]
ttft_p99 = "1.5s"
[class.p2]
ttft_p99 = "10s"
starts_within = "2 min"
max_waiting = 64
[keys]
"key-name" = { max_class = "p0", class = "p1", share = 0.5 }
batch = { max_class = "p2" }
"""


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "targets.toml"
    file.write_text(text)
    return file


def test_every_field_is_read_in_milliseconds(tmp_path: Path) -> None:
    assert read_targets(write(tmp_path, FULL)) == Targets(
        p0=ClassTargets(ttft_p99=80.0, itl_p99=20.0, max_queue=0.5, weight=4.0),
        p1=ClassTargets(ttft_p99=1500.0, weight=2.0),
        p2=ClassTargets(ttft_p99=10_000.0, starts_within=120_000.0, max_waiting=64),
        keys={
            "key-name": KeyRule(max_class=ServiceClass.P0, service_class=ServiceClass.P1, share=0.5),
            "batch": KeyRule(max_class=ServiceClass.P2),
        },
    )


def test_what_a_file_leaves_out_is_as_without_it(tmp_path: Path) -> None:
    assert read_targets(write(tmp_path, "")) == Targets()
    told = read_targets(write(tmp_path, '[class.p0]\nttft_p99 = "80ms"\n'))
    assert (told.p0.max_queue, told.p0.weight) == (Targets().p0.max_queue, Targets().p0.weight)


WRONG = [
    ("[class.p3]", "class: unknown class 'p3'; known are p0, p1, p2"),
    ("[class.P0]", "unknown class 'P0'"),
    ("[classes.p0]", "unknown entry 'classes'; known are class, keys"),
    ("[class.p0]\nttft = '1s'", "class.p0: unknown field 'ttft'; known are ttft_p99, itl_p99"),
    ("[class]\np0 = 3", "class.p0 = 3: expected a table"),
    ("class = 3", "class = 3: expected a table"),
    ("[class.p0]\nttft_p99 = 80", "class.p0.ttft_p99 = 80: expected a time with its unit, in quotes"),
    ("[class.p0]\nttft_p99 = '80'", 'class.p0.ttft_p99 = "80": expected a time'),
    ("[class.p0]\nttft_p99 = '-1s'", "expected a time"),
    ("[class.p0]\nttft_p99 = '0ms'", "more than 0 and at most a day"),
    ("[class.p0]\nttft_p99 = '99999999s'", "more than 0 and at most a day"),
    ("[class.p0]\nttft_p99 = '1h'", "expected a time"),
    ("[class.p0]\nttft_p99 = '10ms'", "class.p0: max_queue of a class .10 ms. must be less than its ttft_p99"),
    ("[class.p1]\nweight = 0", "class.p1.weight = 0: expected a number from"),
    ("[class.p1]\nweight = true", "class.p1.weight = true: expected a number, without quotes"),
    ("[class.p1]\nweight = nan", "class.p1.weight = NaN: expected a number from"),
    ("[class.p1]\nmax_waiting = 0", "class.p1.max_waiting = 0: expected a whole number, 1 or more"),
    ("[class.p1]\nmax_waiting = 1.5", "class.p1.max_waiting = 1.5: expected a whole number"),
    ("[keys]\na = 'p0'", 'keys."a" = "p0": expected a table'),
    ("[keys]\na = { class = 'p5' }", 'keys."a".class = "p5": expected "p0" or "p1" or "p2"'),
    ("[keys]\na = { class = [0] }", 'keys."a".class = .0.: expected'),
    ("[keys]\na = { maxclass = 'p0' }", 'keys."a": unknown field .maxclass.; known are max_class, class, share'),
    ("[keys]\na = { class = 'p0', max_class = 'p1' }", 'keys."a": a key.s class p0 is better than its max_class p1'),
    ("[keys]\na = { share = 0 }", 'keys."a".share = 0: expected a number from'),
    ("[keys]\n'a=b' = {}", 'keys."a=b": a key.s name has letters'),
    ("[keys]\n'' = {}", "a key.s name has letters"),
    ("[class.p0]\n[class.p0]", "is not valid TOML"),
    ("x = " + "9" * 5000, "is not valid TOML"),
    ("\x00", "is not valid TOML"),
]


@pytest.mark.parametrize(("text", "says"), WRONG, ids=[text[:40] for text, _ in WRONG])
def test_an_error_says_file_place_and_value(text: str, says: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=says) as caught:
        read_targets(file)
    assert str(caught.value).startswith(str(file))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no-such.toml: No such file"):
        read_targets(tmp_path / "no-such.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_targets(str(tmp_path))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["80ms", "p0"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["p0", "share", "x"]), inner),
    max_leaves=5,
)
TABLES = st.fixed_dictionaries(
    {},
    optional={
        "class": st.dictionaries(
            st.sampled_from(CLASS_NAMES),
            st.dictionaries(st.sampled_from(ClassTargets.__struct_fields__), VALUES) | VALUES,
        ),
        "keys": st.dictionaries(st.text(max_size=4), st.dictionaries(st.sampled_from(["class", "share"]), VALUES)),
    },
)


@given(TABLES)
def test_any_table_is_read_or_refused(table: dict[str, object]) -> None:
    told: Targets | str
    try:
        told = parse_targets(table, "the file")
    except ConfigError as error:
        told = str(error)
    assert isinstance(told, Targets) or told.startswith("the file: ")


def test_engine_args_take_a_path(tmp_path: Path) -> None:
    file = write(tmp_path, FULL)
    assert EngineArgs(targets=file).targets == EngineArgs(targets=str(file)).targets == read_targets(file)
    with pytest.raises(ConfigError, match="no-such"):
        EngineArgs(targets="no-such.toml")


def test_classes_have_names() -> None:
    assert [class_named(name) for name in CLASS_NAMES] == list(ServiceClass)
    assert [service.label for service in ServiceClass] == list(CLASS_NAMES)
    for wrong in ("P0", "", "priority", 0, None):
        with pytest.raises(InvalidRequest, match="service_class must be one of p0, p1, p2"):
            class_named(wrong)
