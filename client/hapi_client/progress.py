"""Progress on a terminal; silence elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
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

    def __enter__(self) -> ConsoleReporter:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextmanager
    def counting(self) -> Iterator[Callable[[str, int, int], None]]:
        """A bar for samples, in the place of those for bytes.

        Yields:
            What is told a description, how many were had, and of how many.
        """
        # A terminal has one live display at a time.
        self._progress.stop()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(
            *columns,
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        ) as bar:
            task = bar.add_task("", total=None)

            def show(description: str, done: int, total: int) -> None:
                if done < bar.tasks[0].completed:
                    bar.reset(task)  # the next epoch
                bar.update(
                    task, description=description, completed=done, total=total
                )

            yield show
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
