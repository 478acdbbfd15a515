"""What else is written to a terminal, beside tqdm's bars on it."""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import ExitStack
from typing import Any, TextIO


def is_terminal(stream: Any) -> bool:
    """What stands for a stream may be closed, None, or know little."""
    ask = getattr(stream, "isatty", None)
    return ask is not None and not getattr(stream, "closed", False) and ask()


class TqdmLogHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """A log on standard error, above bars where some are shown."""

    def emit(self, record: logging.LogRecord) -> None:
        # Where nobody has imported it, or not all of it, there is no bar.
        tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if tqdm is None:
            super().emit(record)
            return
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class TqdmSafeStream:
    """Stands for ``sys.stdout`` while bars are shown on the same terminal.

    What is printed goes above them: whole lines at once; what was flushed
    without an end has the terminal's last line to itself until it ends.
    """

    def __init__(self) -> None:
        self._stream: TextIO = sys.stdout
        self._lock = threading.RLock()
        self._held = ""
        self._is_shown = True
        # Not empty while the bars are away.
        self._away: ExitStack | None = None
        if is_terminal(self._stream):
            sys.stdout = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def has_open_line(self) -> bool:
        """Whether no bar should be drawn."""
        return self._away is not None

    def write(self, text: str) -> int:
        with self._lock:
            if not self._is_shown:
                return self._stream.write(text)
            lines, end, self._held = (self._held + text).rpartition("\n")
            if end:
                self._write(lines + end)
                self._bars_return()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            if self._held:
                self._write(self._held)
                self._held = ""
        self._stream.flush()

    def _write(self, text: str) -> None:
        if self._away is None:
            from tqdm import tqdm

            self._away = ExitStack()
            self._away.enter_context(
                # Their lock is not kept: the line may be open for long.
                tqdm.external_write_mode(file=sys.stderr, nolock=True)
            )
        self._stream.write(text)
        self._stream.flush()

    def _bars_return(self) -> None:
        if self._away is not None:
            self._away.close()
            self._away = None

    def end(self) -> None:
        """From now on it only hands on: somebody may still refer to it."""
        with self._lock:
            if not self._is_shown:
                return
            self.flush()
            self._is_shown = False
            # Of those below, some may have ended before this one.
            while (
                isinstance(sys.stdout, TqdmSafeStream)
                and not sys.stdout._is_shown
            ):
                sys.stdout = sys.stdout._stream
