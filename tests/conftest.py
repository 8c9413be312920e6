"""What all rooms' tests need."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

from tests.support.certificate import Certificate, make_certificate
from tests.support.quick_interpreter import quicken

if not torch.cuda.is_available():
    # Triton reads this when a kernel is defined, so it must be set before any kernel's module is imported.
    os.environ["TRITON_INTERPRET"] = "1"
    quicken()


# Servers that tests kill leave recordings: not among those of who runs the tests.
_STATE = tempfile.TemporaryDirectory(prefix="firsttoken-tests-", ignore_cleanup_errors=True)
os.environ["XDG_STATE_HOME"] = _STATE.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What else a machine does only adds to times: a bound that holds once in three tries holds."""
    for item in items:
        if item.get_closest_marker("clock"):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=1))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Reports travel between test workers as UTF-8; tests of invalid text log lone surrogates, which have none."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificate"))
