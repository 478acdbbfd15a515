"""Progress of the runs, on the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TextIO

from swift_functional.outcomes import Record

LINE_SECONDS = 15.0
"""Interval of lines if the output is not a terminal."""


class Progress:
    """Progress of one suite in one layout; one line on a terminal.

    Args:
        what: name of the run.
        stream: stream for the progress.
    """

    def __init__(self, what: str, stream: TextIO) -> None:
        self._what = what
        self._stream = stream
        self._terminal = stream.isatty()
        self._last = time.monotonic()

    def show(self, records: Mapping[str, Record]) -> None:
        now = time.monotonic()
        if self._terminal:
            self._say(f"\r\x1b[K{describe(self._what, records)}", "")
        elif now - self._last >= LINE_SECONDS:
            self._last = now
            self._say(describe(self._what, records), "\n")

    def done(self) -> None:
        if self._terminal:
            self._say("\r\x1b[K", "")

    def _say(self, text: str, end: str) -> None:
        print(text, end=end, file=self._stream, flush=True)


def describe(what: str, records: Mapping[str, Record]) -> str:
    """One line with the number of ended and of failed tests."""
    parts = []
    for name, record in records.items():
        part = f"{name} the filter {record.num_ended}"
        part += f" of {len(record.selected)} tests"
        if record.num_bad:
            part += f" ({record.num_bad} failed)"
        parts.append(part)
    return f"{what}: {', '.join(parts)}"
