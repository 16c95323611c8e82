"""A plugin of pytest: a test that fails is told at once, and runs a second time at the end of its process's run.

conftest.py adds it where TEST_FLAKY names a file, as the Makefile does. A second failure fails the run. What passes
then is flaky: the summary says how it failed first, the file gets a line, and the third line in it fails the run: a
fault that shows now and then is a fault. All fixtures are made anew for the second time, those of the session too.

With --maxfail or --pdb the first failure is the one that is looked for: nothing runs again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

MOST = 2  # flaky tests of all processes and runs that have written to one file


class Retries:
    """In a process that runs tests `failed` fills; in that which reports, which may be the same, `first` does."""

    def __init__(self, config: pytest.Config, flaky: Path, seed: str, slowness: Callable[[], float]) -> None:
        self.config, self.flaky, self.seed, self.slowness = config, flaky, seed, slowness
        self.failed: list[tuple[pytest.Item, int | None]] = []
        self.second = False
        self.first: dict[str, pytest.TestReport] = {}  # how they failed, by test that has not passed since
        self.passed: list[tuple[str, pytest.TestReport]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        failures = [report for report in reports if report.failed]
        if failures and not self.second:
            self.failed.append((item, self._index()))
            report = failures[0]
            report.outcome = "retried"  # type: ignore[assignment]
            item.user_properties.append(("failed once", self._circumstances()))  # which the second try's reports have
            report.user_properties = list(item.user_properties)
            reports = [report]
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        result = yield
        self.second = True
        for item, index in self.failed:
            if index is not None:
                self._worker().item_index = index
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return result

    def _worker(self) -> Any:
        """pytest-xdist's part in a process that it has started: a report bears the number of its test."""
        return next((one for one in self.config.pluginmanager.get_plugins() if hasattr(one, "item_index")), None)

    def _index(self) -> int | None:
        return getattr(self._worker(), "item_index", None)

    def _circumstances(self) -> str:
        load = "load " + " ".join(f"{one:.1f}" for one in os.getloadavg()) if hasattr(os, "getloadavg") else "load ?"
        slow = f"{self.slowness():.1f} times as slow as budgets.toml"
        return f"TEST_SEED={self.seed}, {load} on {os.cpu_count()} cores, {slow}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(self.config, "workerinput"):
            return
        if report.outcome == "retried":
            self.first[report.nodeid] = report
            self._say(f"FAILED ONCE {report.nodeid}: {_why(report)}; {dict(report.user_properties)['failed once']}")
        elif report.nodeid in self.first and report.failed:
            del self.first[report.nodeid]
            self._say(f"FAILED TWICE {report.nodeid}: {_why(report)}")
        elif report.nodeid in self.first and report.when == "teardown":
            first = self.first.pop(report.nodeid)
            self.passed.append((report.nodeid, first))
            with self.flaky.open("a", encoding="utf-8") as stream:
                stream.write(f"{report.nodeid}: {_why(first)}; {dict(first.user_properties)['failed once']}\n")
            self._say(f"FLAKY {report.nodeid}: it passes on the second try")

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return ("retried", "R", "RETRIED") if report.outcome == "retried" else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(self.config, "workerinput") and (self.first or self._flaky() > MOST):
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid, first in self.passed:
            terminalreporter.section(f"flaky: {nodeid}, {dict(first.user_properties)['failed once']}")
            first.toterminal(terminalreporter._tw)
        for nodeid in self.first:
            terminalreporter.line(f"FAILED ONCE and did not run again: {nodeid}")
        if (count := self._flaky()) and self.passed:
            much = f"FAILED: more than {MOST}" if count > MOST else f"{MOST} at most"
            terminalreporter.line(f"{count} flaky tests so far, {much}: {self.flaky}")

    def _flaky(self) -> int:
        return len(self.flaky.read_text(encoding="utf-8").splitlines()) if self.flaky.exists() else 0

    def _say(self, line: str) -> None:
        reporter: Any = self.config.pluginmanager.get_plugin("terminalreporter")
        reporter.ensure_newline()
        reporter.write_line(line)


def _why(report: pytest.TestReport) -> str:
    """The error in a line, and in which part of the test."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longreprtext if crash is None else crash.message
    return f"({report.when}) {' '.join(text.split())[:300]}"


def register(config: pytest.Config, seed: str, slowness: Callable[[], float]) -> None:
    if (flaky := os.environ.get("TEST_FLAKY")) and not (config.getoption("maxfail") or config.getoption("usepdb")):
        config.pluginmanager.register(Retries(config, Path(flaky).absolute(), seed, slowness), "retries")
