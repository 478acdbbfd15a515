"""A validation server whose children wait while a file exists.

``ForkServer("paused_validation")`` starts it, with the path of the file
in the environment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from children import ProcessIdentity, children, family
from hapi_splitter.fork_server import (
    ForkServer,
    Request,
    serve,
)
from hapi_splitter.graph.shapes import warm_up
from hapi_splitter.package.subprocess_validation import answer_request
from waiting import SECONDS, until

_VARIABLE = "PAUSED_VALIDATION"


class PausedValidations:
    """Holds validations of this process until they are released."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.server = ForkServer("paused_validation")

    def pause(self) -> None:
        self._file.touch()

    def release(self) -> None:
        self._file.unlink()

    def children(self) -> list[ProcessIdentity]:
        """The processes that validate now."""
        return servers(os.getpid(), "paused_validation")[1:]

    def child(self) -> ProcessIdentity:
        """Waits for a process that validates."""
        until(self.children, SECONDS)
        return self.children()[0]


@contextlib.contextmanager
def paused_validations(folder: Path) -> Iterator[PausedValidations]:
    paused = PausedValidations(folder / "paused")
    with pytest.MonkeyPatch.context() as patch, paused.server:
        patch.setenv(_VARIABLE, str(folder / "paused"))
        paused.pause()
        yield paused


def servers(
    user: int, module: str = "hapi_splitter.package.subprocess_validation"
) -> list[ProcessIdentity]:
    """The server of a process, and its children.

    A cluster that the process has started may have a worker with another.
    """
    own = [pid for pid in children(user) if module in _command(pid)]
    return [each for server in own for each in family(server)]


def _command(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/cmdline").read_text()
        return text.split("\0")
    return []


def _answer(descriptor: int, request: Request) -> dict[str, Any]:
    paused = Path(os.environ[_VARIABLE])
    until(lambda: not paused.exists(), SECONDS)
    return answer_request(descriptor, request)


if __name__ == "__main__":
    warm_up()
    serve(_answer)
