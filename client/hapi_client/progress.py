"""Progress on a terminal; silence elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
)
from typing import BinaryIO, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class Reporter(Protocol):
    """What library functions tell of long work."""

    def reading(
        self, file: BinaryIO, description: str, length_bytes: int
    ) -> BinaryIO:
        """``file``, or a wrapper that shows how far it was read."""
        ...

    def note(self, text: str) -> None:
        """One line on what happens now."""
        ...

    def resting(self) -> AbstractContextManager[None]:
        """Others may show theirs inside: a terminal has one live display."""
        ...


class SilentReporter:
    """Tells nothing."""

    def reading(
        self, file: BinaryIO, description: str, length_bytes: int
    ) -> BinaryIO:
        return file

    def note(self, text: str) -> None:
        pass

    def resting(self) -> AbstractContextManager[None]:
        return nullcontext()


class ConsoleReporter:
    """Bars on standard error if it is a terminal, notes in any case.

    Use it as a context manager.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._progress = self._make()

    def _make(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> ConsoleReporter:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextmanager
    def resting(self) -> Iterator[None]:
        self._progress.stop()
        try:
            yield
        finally:
            # The old one would take the place that it had: what was written
            # there meanwhile would be lost.
            self._progress = self._make()
            self._progress.start()

    def reading(
        self, file: BinaryIO, description: str, length_bytes: int
    ) -> BinaryIO:
        if self._progress.disable:
            return file
        return self._progress.wrap_file(
            file, total=length_bytes, description=description
        )

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)
