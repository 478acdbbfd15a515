"""A pytest plugin that reports each test to another process at once.

It writes a line of JSON to the file descriptor in ``SWIFT_FUNCTIONAL_FD`` for
every event: ``{"broken": id, "reason": …}`` for a module that cannot be
imported, ``{"selected": [id…]}``, and for each phase of a test ``{"test": id,
"phase": …, "outcome": …, "reason": …, "seconds": …}``.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

VARIABLE = "SWIFT_FUNCTIONAL_FD"
REASON_CHARACTERS = 300


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _tell({"broken": report.nodeid, "reason": _reason(report)})


def pytest_collection_finish(session: pytest.Session) -> None:
    _tell({"selected": [item.nodeid for item in session.items]})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcome: str = report.outcome
    if report.skipped and hasattr(report, "wasxfail"):
        outcome = "xfailed"
    _tell(
        {
            "test": report.nodeid,
            "phase": report.when,
            "outcome": outcome,
            "reason": "" if report.passed else _reason(report),
            "seconds": report.duration,
        }
    )


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """The reason of an outcome, on one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if isinstance(report.longrepr, tuple):
        text = str(report.longrepr[2]).removeprefix("Skipped: ")
    elif crash is not None:
        text = str(crash.message)
    else:
        # A module that cannot be imported: the lines marked by pytest.
        lines = report.longreprtext.splitlines()
        text = " ".join(line[1:] for line in lines if line.startswith("E "))
    return " ".join(text.split())[:REASON_CHARACTERS]


def _tell(event: dict[str, Any]) -> None:
    line = json.dumps(event).encode() + b"\n"
    descriptor = int(os.environ[VARIABLE])
    while line:
        line = line[os.write(descriptor, line) :]
