"""Facts that a resumed run depends on, and files that are always whole."""

from __future__ import annotations

import io
import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hapi_client.atomic_file import write_atomically
from hapi_protocol.errors import ClientError

logger = logging.getLogger(__name__)

_DIFFERENT_WEIGHTS = (
    "its frozen layers have different weights (another model, --weights or "
    "--checkpoint, or another --seed of random ones)"
)


def check_features_match(
    saved: Mapping[str, Any], present: Mapping[str, Any]
) -> None:
    """Compares what the features of a checkpoint and of a run depend on.

    Args:
        saved: ``TransferJob.features_facts()`` of the checkpoint.
        present: the same of the run.

    Raises:
        ClientError: ``bad_state`` naming each difference.
    """
    differences = [
        _DIFFERENT_WEIGHTS
        if name == "weights"
        else f"its {name} is {saved.get(name)!r}, this run's {value!r}"
        for name, value in present.items()
        if saved.get(name) != value
    ]
    if differences:
        raise ClientError(
            "bad_state",
            f"the checkpoint has different features: {'; '.join(differences)}"
            "; use the options of its run, or give another file",
        )


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the state of the generators that dropout etc. use."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(
    device: torch.device, state: Mapping[str, torch.Tensor]
) -> None:
    """Restores a state from :func:`random_state`.

    The generator of a device of another kind is not changed.
    """
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def save_atomically(content: Any, path: Path) -> None:
    """Saves like ``torch.save``, but never leaves an incomplete file.

    Raises:
        ClientError: ``bad_configuration`` if the file cannot be written.
    """
    # Through memory: torch's writer, interrupted while it writes to a file,
    # writes again when it is destroyed, and aborts the process if the file
    # is closed by then.
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with write_atomically(path) as file:
        file.write(buffer.getbuffer())


@contextmanager
def defer_interrupts() -> Iterator[threading.Event]:
    """Makes the first Ctrl-C set an event; a second one interrupts.

    Changes nothing in a thread other than the main thread, or if SIGINT is
    ignored.
    """
    stop_requested = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (
        signal.SIG_IGN,
        None,
    ):
        yield stop_requested
        return

    def interrupted(*_: object) -> None:
        if stop_requested.is_set():
            raise KeyboardInterrupt
        stop_requested.set()
        logger.warning(
            "stopping after this step; press Ctrl-C again to stop now"
        )

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield stop_requested
    finally:
        signal.signal(signal.SIGINT, before)
