"""Runs pytest against two clusters concurrently.

Both runs have the same load of the machine, and together take little longer
than one of them.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hapi_cluster.logs import tail
from hapi_cluster.process_control import die_with
from swift_functional.errors import NotRunError
from swift_functional.outcomes import Outcome, Record
from swift_functional.recorder import VARIABLE

TEST_SECONDS = 300
"""Timeout of one test."""
SILENCE_SECONDS = TEST_SECONDS + 60.0
"""Time without an event after which pytest is killed."""
TICK_SECONDS = 1.0
END_SECONDS = 20.0
COMPLETE = (0, 1, 5)
"""Exit statuses of pytest: all passed, some failed, none selected."""


@dataclass(frozen=True)
class Task:
    """Tests for pytest to run.

    Attributes:
        source: folder with ``test/``.
        tests: files, folders or ids in it.
        options: additional options of pytest.
    """

    source: Path
    tests: Sequence[str]
    options: Sequence[str] = ()


@dataclass(frozen=True)
class Result:
    """Result of one task on one cluster."""

    outcomes: Mapping[str, Outcome]
    seconds: float


class Run:
    """One pytest process, which ends with the ``with`` block.

    Args:
        task: tests to run.
        config: the ``test.conf`` of the cluster.
        logs: folder for pytest's log and its JUnit XML.
    """

    def __init__(self, task: Task, config: Path, logs: Path) -> None:
        self.record = Record()
        self.heard = self._began = time.monotonic()
        self.seconds = 0.0
        self.log = logs / "pytest.log"
        self.reader, writer = os.pipe()
        self._rest = b""
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    _command(task, logs / "junit.xml"),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=task.source,
                    env=_environment(task.source, config, writer),
                    pass_fds=(writer,),
                    start_new_session=True,
                    preexec_fn=die_with(os.getpid()),
                )
        except BaseException:
            os.close(self.reader)
            raise
        finally:
            os.close(writer)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.wait(END_SECONDS)
        os.close(self.reader)

    def kill(self) -> None:
        """Kills pytest; tests that have not ended are unfinished."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def read(self) -> bool:
        """Reads new events; False if there will be no more."""
        data = os.read(self.reader, 65536)
        self.heard = time.monotonic()
        self.seconds = self.heard - self._began
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.record.take(json.loads(line))
        return bool(data)

    def result(self) -> Result:
        """The result, after the last event.

        Raises:
            NotRunError: pytest could not start, or did not end.
        """
        broken = self.record.broken
        if broken:
            modules = "\n".join(f"  {m}: {broken[m]}" for m in broken)
            raise NotRunError(f"cannot import modules of tests:\n{modules}")
        outcomes = self.record.outcomes()
        status = self._process.wait(END_SECONDS)
        if status not in COMPLETE and not any(
            outcome.kind == "unfinished" for outcome in outcomes.values()
        ):
            raise NotRunError(
                f"pytest ended with status {status}:\n{tail(self.log)}"
            )
        return Result(outcomes, self.seconds)


def _command(task: Task, junit: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "pytest", "-c", os.devnull, "-q", "-ra"),
        *("-p", "swift_functional.recorder", "-p", "pytest_timeout"),
        *("-p", "no:cacheprovider"),
        f"--rootdir={task.source}",
        f"--timeout={TEST_SECONDS}",
        f"--junitxml={junit}",
        *task.options,
        *task.tests,
    ]


def _environment(source: Path, config: Path, writer: int) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SWIFT_TEST_", "PYTEST_", "AWS_"))
    }
    # The source comes first: Python itself has a package "test".
    folders = [source, Path(__file__).resolve().parents[1]]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "SWIFT_TEST_CONFIG_FILE": str(config),
        "SWIFT_TEST_IN_PROCESS": "0",
        # The tests run with the same plugins, whatever is installed.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        VARIABLE: str(writer),
    }


def run_side_by_side(
    task: Task,
    clusters: Mapping[str, tuple[Path, Path]],
    show: Callable[[Mapping[str, Record]], None],
) -> dict[str, Result]:
    """Runs the same tests against each cluster.

    Args:
        task: tests to run.
        clusters: ``test.conf`` and folder for logs, by name.
        show: called about every second with the records so far.

    Raises:
        NotRunError: one of them has no result.
    """
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(Run(task, config, logs))
            for name, (config, logs) in clusters.items()
        }
        selector = stack.enter_context(selectors.DefaultSelector())
        for run in runs.values():
            selector.register(run.reader, selectors.EVENT_READ, run)
        while selector.get_map():
            for key, _ in selector.select(TICK_SECONDS):
                if not key.data.read():
                    selector.unregister(key.fd)
            show({name: run.record for name, run in runs.items()})
            _end_silent(runs.values())
        return {name: run.result() for name, run in runs.items()}


def _end_silent(runs: Iterable[Run]) -> None:
    for run in runs:
        if time.monotonic() - run.heard > SILENCE_SECONDS:
            run.kill()
