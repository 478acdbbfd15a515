"""Interfaces and bars by which library functions report long work."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, BinaryIO, Protocol

from hapi_protocol.errors import ClientError

ENVIRONMENT = "HAPI_PROGRESS"


class Reporter(Protocol):
    """Receives the progress of long work."""

    def reading(
        self, file: BinaryIO, description: str, length_bytes: int
    ) -> BinaryIO:
        """Returns ``file``, or a wrapper that shows how much was read."""
        ...

    def note(self, text: str) -> None:
        """Reports the present step in one line."""
        ...


class SilentReporter:
    """Shows nothing."""

    def reading(
        self, file: BinaryIO, description: str, length_bytes: int
    ) -> BinaryIO:
        return file

    def note(self, text: str) -> None:
        pass


def progress_wanted(environ: Mapping[str, str]) -> bool | None:
    """Returns if progress is shown; None if only on a terminal or notebook.

    Args:
        environ: environment variables; ``HAPI_PROGRESS`` is read.

    Raises:
        ClientError: ``bad_configuration`` for another value than 0 and 1.
    """
    value = environ.get(ENVIRONMENT) or None
    if value not in (None, "0", "1"):
        raise ClientError(
            "bad_configuration",
            f"{ENVIRONMENT} is {value!r}; set 0 to never show progress, 1 to "
            "show it without a terminal, too, or unset it",
        )
    return None if value is None else value == "1"


def is_terminal(stream: Any) -> bool:
    """Returns True if ``stream`` is open and a terminal.

    Programs replace standard streams with None or with objects that have few
    methods.
    """
    isatty = getattr(stream, "isatty", None)
    if isatty is None or getattr(stream, "closed", False):
        return False
    return bool(isatty())


def make_bar(**options: Any) -> Any:
    """Starts a tqdm bar on standard error that vanishes when it is closed."""
    # Imported late: commands without a bar need not wait for it.
    from tqdm.auto import tqdm

    # tqdm's monitor thread would outlive the bar.
    bar_class = type("Bar", (tqdm,), {"monitor_interval": 0})
    return bar_class(
        file=sys.stderr, leave=False, dynamic_ncols=True, **options
    )
