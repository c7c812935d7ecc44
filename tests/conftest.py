"""Fixtures and the handling of tests that need a GPU: without one they are skipped, in sight and counted."""

from __future__ import annotations

import os

import pytest
import torch

NO_GPU = "needs a CUDA GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = sum(NO_GPU in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.write_line(f"{skipped} GPU tests did not run: no CUDA GPU here", yellow=True)


def pytest_sessionstart() -> None:
    # The workers of pytest-xdist share the cores: one thread each, or they wait for one another.
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
