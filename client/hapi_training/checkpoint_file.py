"""Checkpoints of ``hapi train``: a run goes on where it ended."""

from __future__ import annotations

import io
import logging
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from hapi_client.atomic_file import file_lock, write_atomically
from hapi_protocol.errors import ClientError

logger = logging.getLogger(__name__)

VERSION = 1
SAVE_SECONDS = 30.0
"""Between two checkpoints inside an epoch."""
_OTHER_WEIGHTS = (
    "its frozen layers have other weights (another model, --weights or "
    "--checkpoint, or another --seed of random ones)"
)


class Checkpoint:
    """A file that a run writes now and then, and goes on from.

    Written beside its place (``.part``) and moved there, so that it is whole
    at every moment.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        # Of a link, what it names is locked, and replaced.
        self._path = path.resolve()
        self._saved = time.monotonic()

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._saved >= SAVE_SECONDS

    def file_lock(self) -> AbstractContextManager[None]:
        """Holds the lock of this file (:func:`file_lock`)."""
        return file_lock(self._path)

    def load(self) -> dict[str, Any] | None:
        """What :meth:`save` wrote last; None where there is no file.

        Raises:
            ClientError: ``bad_state`` for a file of something else,
                ``bad_configuration`` where it cannot be read.
        """
        if not self._path.exists():
            return None
        try:
            found = torch.load(
                self._path, map_location="cpu", weights_only=True
            )
            if found["version"] == VERSION:
                return dict(found)
            why = f"its version is {found['version']!r}"
        except OSError as error:
            raise ClientError(
                "bad_configuration",
                f"{self._path} cannot be read: {error}",
            ) from error
        except MemoryError:
            raise
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


def check_same(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Compares what the features depend on
    (:meth:`hapi_client.job.transfer_job.TransferJob.features_facts`).

    Raises:
        ClientError: ``bad_state`` naming each difference.
    """
    found = [
        _OTHER_WEIGHTS
        if name == "weights"
        else f"its {name} is {saved.get(name)!r}, and this run's {value!r}"
        for name, value in mine.items()
        if saved.get(name) != value
    ]
    if found:
        raise ClientError(
            "bad_state",
            f"the checkpoint is of other features: {'; '.join(found)}; run "
            "as it was begun, or give another file",
        )


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Of the generators that a tail draws from, as dropout does."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def set_random_state(
    device: torch.device, state: Mapping[str, torch.Tensor]
) -> None:
    """What :func:`random_state` gave, also on a device of another kind.

    There the generator of the device stays as it is.
    """
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def write_whole(content: Any, path: Path) -> None:
    """``torch.save`` that leaves no half of a file.

    Raises:
        ClientError: ``bad_configuration`` where it cannot be written.
    """
    # Not to the file: an interrupt inside torch's writer, whose end writes
    # to what is closed then, would abort the process.
    made = io.BytesIO()
    torch.save(content, made)
    with write_atomically(path) as file:
        file.write(made.getbuffer())


@contextmanager
def heeding_interrupts() -> Iterator[threading.Event]:
    """Ctrl-C sets an event, for the end of a step; a second one interrupts.

    In another thread than the main one nothing changes, nor where somebody
    has decided that interrupts do not matter.
    """
    asked = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (
        signal.SIG_IGN,
        None,
    ):
        yield asked
        return

    def interrupted(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        logger.warning("ending behind this step; once more ends it at once")

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
