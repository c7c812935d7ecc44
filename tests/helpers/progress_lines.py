"""Progress output for thousands of tests: the number done, and one line about skipped ones."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable
from typing import Any

import pytest

EVERY_S = 10.0
MAX_REASONS = 6


class Progress:
    """Lines instead of dots: in a log, dots are one line that grows for minutes.

    For the process that distributes tests, whose output is not captured.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._reporter: Any = None
        self._begin = time.monotonic()
        self._done: set[str] = set()
        self._failed = 0
        self._total: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Generator[None, tuple[str, str, str], tuple[str, str, str]]:
        category, _, word = yield
        return category, "", word

    def pytest_sessionstart(self) -> None:
        self._reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if self._reporter is not None:
            self._reporter.showfspath = False
            self._reporter._show_progress_info = False  # percents at the ends of rows of dots
        self._thread.start()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._total = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._done.add(report.nodeid)
        if report.failed:
            self._failed += 1
            self._write(f"FAILED {report.nodeid}")

    def pytest_sessionfinish(self) -> None:
        self._ended.set()
        self._thread.join()

    def line(self) -> str:
        seconds = time.monotonic() - self._begin
        if not self._total:
            return f"collecting tests ({seconds:.0f} s)"
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{len(self._done):,} of {self._total:,} tests done{failed} ({seconds:.0f} s)"

    def _write(self, line: str) -> None:
        if self._reporter is not None:
            self._reporter.ensure_newline()
            self._reporter.write_line(line)

    def _repeat(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._write(self.line())


def skipped_line(reasons: Iterable[str]) -> str:
    """The number of skipped tests, by reason; "" if none was skipped."""
    counts = Counter(reason.removeprefix("Skipped: ") for reason in reasons)
    if not counts:
        return ""
    first = counts.most_common(MAX_REASONS)
    texts = [f"{count:,} {reason}" for reason, count in first]
    others = counts.total() - sum(count for _, count in first)
    if others:
        texts.append(f"{others:,} for {len(counts) - len(first)} other reasons (pytest -rs lists them)")
    return f"{counts.total():,} skipped: {', '.join(texts)}"
