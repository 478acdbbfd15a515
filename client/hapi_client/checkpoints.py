"""Checkpoints of ``hapi train``: a run goes on where it ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hapi_protocol.errors import ClientError

VERSION = 1
SAVE_SECONDS = 30.0
"""Between two checkpoints inside an epoch."""


class Checkpoint:
    """A file that a run writes now and then, and goes on from.

    Written beside its place and moved there, so that it is whole at every
    moment.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saved = time.monotonic()

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._saved >= SAVE_SECONDS

    def load(self) -> dict[str, Any] | None:
        """What :meth:`save` wrote last; None where there is no file.

        Raises:
            ClientError: ``bad_state`` for a file of something else.
        """
        if not self._path.exists():
            return None
        try:
            found = torch.load(self._path, weights_only=True)
            if found["version"] == VERSION:
                return dict(found)
            why = f"its version is {found['version']!r}"
        except Exception as error:  # whatever is in the file
            why = f"{type(error).__name__}: {error}"
        raise ClientError(
            "bad_state",
            f"{self._path} is no checkpoint of version {VERSION}: {why}; "
            "give another file, or remove it to begin anew",
        )

    def save(self, **parts: Any) -> None:
        """Keeps tensors, numbers, texts, and lists and mappings of them.

        Raises:
            ClientError: ``bad_configuration`` where it cannot be written.
        """
        write_whole({"version": VERSION, **parts}, self._path)
        self._saved = time.monotonic()


def write_whole(content: Any, path: Path) -> None:
    """``torch.save`` that leaves no half of a file.

    Raises:
        ClientError: ``bad_configuration`` where it cannot be written.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        torch.save(content, beside)
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:
        beside.unlink(missing_ok=True)
        raise ClientError(
            "bad_configuration", f"{path} cannot be written: {error}"
        ) from error


@contextmanager
def heeding_interrupts() -> Iterator[threading.Event]:
    """Ctrl-C sets an event, for the end of a step; a second one interrupts.

    In another thread than the main one nothing changes.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.getsignal(signal.SIGINT)

    def interrupted(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
