"""Runs pytest against two clusters concurrently.

Both runs have the same load of the machine, and together take little longer
than one of them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from xml.etree import ElementTree

from hapi_cluster.logs import tail
from hapi_cluster.process_control import die_with
from swift_functional import NotRunError
from swift_functional.comparison import KINDS, Outcome, Result

TEST_SECONDS = 300
"""Timeout of one test."""
SILENCE_SECONDS = TEST_SECONDS + 60.0
"""Time without a line of pytest after which it is killed."""
TICK_SECONDS = 0.2
PROGRESS_SECONDS = 15.0
COMPLETE = (0, 1, 5)
"""Exit statuses of pytest: all passed, some failed, none selected."""
REASON_CHARACTERS = 300


def run_side_by_side(
    source: Path,
    places: Mapping[str, Path],
    name: str,
    arguments: Sequence[str],
) -> dict[str, Result]:
    """Runs the same tests against each cluster.

    Args:
        source: folder with Swift's ``test/``.
        places: for each cluster, the folder with its ``test.conf``, which
            gets pytest's log and its JUnit XML in a folder ``name``.
        arguments: tests and options of pytest.

    Raises:
        NotRunError: pytest could not start, died, or was silent.
    """
    folders = {side: place / name for side, place in places.items()}
    with ExitStack() as stack:
        processes = {}
        for side, folder in folders.items():
            processes[side] = _start(source, folder, arguments)
            stack.callback(_end, processes[side])
        told = time.monotonic()
        while any(each.poll() is None for each in processes.values()):
            time.sleep(TICK_SECONDS)
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                _tell_progress(folders)
            for side, process in processes.items():
                log = folders[side] / "pytest.log"
                silent = time.time() - log.stat().st_mtime
                if process.poll() is None and silent > SILENCE_SECONDS:
                    _end(process)
    for side, process in processes.items():
        status, folder = process.returncode, folders[side]
        if status not in COMPLETE or not (folder / "junit.xml").exists():
            raise NotRunError(
                f"pytest {side} the filter has no result, status {status}:\n"
                + tail(folder / "pytest.log")
            )
    return {
        side: read_junit(folder / "junit.xml", source)
        for side, folder in folders.items()
    }


def _start(
    source: Path, folder: Path, arguments: Sequence[str]
) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    junit = folder / "junit.xml"
    junit.unlink(missing_ok=True)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SWIFT_TEST_", "PYTEST_", "AWS_"))
    }
    with (folder / "pytest.log").open("wb") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest", "-c", os.devnull, "-v"),
                *("-ra", "-p", "pytest_timeout", "-p", "no:cacheprovider"),
                *("-o", "console_output_style=count"),
                f"--rootdir={source}",
                f"--timeout={TEST_SECONDS}",
                f"--junitxml={junit}",
                *arguments,
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=source,
            env={
                **kept,
                # The source comes first: Python itself has a package "test".
                "PYTHONPATH": str(source),
                "SWIFT_TEST_CONFIG_FILE": str(folder.parent / "test.conf"),
                "SWIFT_TEST_IN_PROCESS": "0",
                # The same plugins, whatever is installed.
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            },
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills pytest and its children, if it runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tell_progress(folders: Mapping[str, Path]) -> None:
    for side, folder in folders.items():
        text = (folder / "pytest.log").read_text(errors="replace")
        counted = re.findall(r"\[ *(\d+/\d+)\]$", text, re.MULTILINE)
        done = counted[-1] if counted else "no"
        print(
            f"{folder.name}: {side} the filter {done} tests", file=sys.stderr
        )


def read_junit(path: Path, source: Path) -> Result:
    """Reads the outcomes from JUnit XML; the worst phase of a test counts.

    Args:
        source: folder of the tests, in which their modules are found.
    """
    (suite,) = ElementTree.parse(path).getroot().iter("testsuite")
    outcomes: dict[str, Outcome] = {}
    for case in suite.iter("testcase"):
        test = _id_of(case.attrib["classname"], case.attrib["name"], source)
        for found in (_outcome_of(each) for each in (None, *case)):
            known = outcomes.setdefault(test, found)
            if KINDS.index(found.kind) > KINDS.index(known.kind):
                outcomes[test] = found
    return Result(outcomes, float(suite.attrib["time"]))


def _outcome_of(element: ElementTree.Element | None) -> Outcome:
    kinds = {"failure": "failed", "error": "error", "skipped": "skipped"}
    kind = "passed" if element is None else kinds.get(element.tag, "passed")
    if element is None or kind == "passed":
        return Outcome("passed")
    if element.get("type") == "pytest.xfail":
        kind = "xfailed"
    reason = " ".join(element.get("message", "").split())
    return Outcome(kind, reason[:REASON_CHARACTERS])


def _id_of(classname: str, name: str, source: Path) -> str:
    """The id with which pytest runs a test again."""
    names = classname.split(".")
    for depth in range(1, len(names) + 1):
        path = Path(*names[:depth]).with_suffix(".py")
        if (source / path).is_file():
            return "::".join([str(path), *names[depth:], name])
    raise ValueError(f"{classname} is in no module of {source}")
