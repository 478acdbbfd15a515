"""Progress on a terminal; silence elsewhere."""

from __future__ import annotations

from typing import BinaryIO, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
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


class SilentReporter:
    """Tells nothing."""

    def reading(
        self, file: BinaryIO, description: str, length_bytes: int
    ) -> BinaryIO:
        return file

    def note(self, text: str) -> None:
        pass


class ConsoleReporter:
    """Bars on standard error if it is a terminal, notes in any case.

    Use it as a context manager.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._counting: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> ConsoleReporter:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_counting()
        self._progress.stop()

    def counting(self, description: str, done: int, total: int) -> None:
        """A bar that shows how many of all samples were had."""
        if self._counting is None:
            # A terminal has one live display at a time.
            self._progress.stop()
            self._counting = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
                disable=not self._console.is_terminal,
            )
            self._counting.start()
            self._task = self._counting.add_task(description, total=total)
        assert self._task is not None, "made with its bar"
        self._counting.update(
            self._task, description=description, completed=done, total=total
        )

    def _stop_counting(self) -> None:
        if self._counting is not None:
            self._counting.stop()
            self._counting = None

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
