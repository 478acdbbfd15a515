"""Tells whether this worker can take packages, by one of its own.

A package is validated in another process, which needs a place for a temporary
file and the rights to start and to read.  Where the host refuses that
(permissions, ``TasksMax``, SELinux), each package would be sent here in vain.
The packages of users decide nothing: theirs may be bad.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hapi_protocol.errors import (
    PACKAGE_REFUSED,
    HapiError,
    UnavailableError,
)
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.package.header import FORMAT, encode_header

AGAIN_SECONDS = 10.0
"""Age at which a failed test is repeated, when a package is refused."""
RETRY_SECONDS = 60.0
"""An operator has to change the host first."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class SelfTest:
    """Loads a small package, as those of users are loaded.

    Args:
        load: validates and loads a package.
        clock: monotonic seconds.

    Attributes:
        problem: why the last test failed; empty if it passed, or there was
            none.
    """

    load: Callable[[bytearray], FrozenGraph]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._tested = float("-inf")
        self._is_running = False
        self._has_ended = False
        self.problem = ""

    def run(self) -> str:
        """Tests now, or waits for the test that runs; returns the problem."""
        asked = self.clock()
        with self._lock:
            if self._tested < asked:
                problem = self._try()
                self._tested = self.clock()
                if not self._has_ended:
                    self._note(problem)
            self._is_running = False
        return self.problem

    def begin(self) -> None:
        """Tests in the background, unless a test runs."""
        if not self._is_running:
            self._is_running = True
            try:
                threading.Thread(
                    target=self.run, name="test of packages", daemon=True
                ).start()
            except RuntimeError as error:  # no threads: the fault it is for
                self._is_running = False
                self._note(str(error))

    def end(self) -> None:
        """Says nothing more: the worker ends, and its processes with it."""
        self._has_ended = True

    def check(self) -> None:
        """Refuses a package that could not be validated here.

        Raises:
            UnavailableError: the last test failed.  If it was some seconds
                ago, another one begins.
        """
        if not self.problem:
            return
        if self.clock() > self._tested + AGAIN_SECONDS:
            self.begin()
        raise UnavailableError(
            "worker_unavailable",
            f"this worker takes no packages: {self.problem}",
            retry_after=RETRY_SECONDS,
            details={PACKAGE_REFUSED: True},
        )

    def _try(self) -> str:
        try:
            self.load(bytearray(_package()))
        except HapiError as error:
            return error.message
        except Exception as error:
            logger.exception("a defect: the test of packages")
            return repr(error)
        return ""

    def _note(self, problem: str) -> None:
        if problem and problem != self.problem:
            logger.error("this worker takes no packages: %s", problem)
        elif self.problem and not problem:
            logger.info("this worker takes packages again")
        self.problem = problem


def _package() -> bytes:
    """A package of one operator, without weights.

    (To make one of a model takes seconds, and torch's compiler.)
    """
    hapi = {
        "format": FORMAT,
        "sample": [3, 8, 8],
        "transform": ImageTransform(resize_size=8, crop_size=8).to_json(),
        "names": ["relu"],
        "cuts": [{"call": 1, "shape": [3, 8, 8], "dtype": "float32"}],
        "producer": {},
    }
    graph = {"calls": [[1, "aten.relu.default", [0]]], "weights": 0}
    return encode_header({"hapi.json": hapi, "graph.json": graph}, {})
