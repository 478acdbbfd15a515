"""Terminal output next to tqdm's bars: notes, logs and the user's prints."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO, TextIO, cast

from hapi_client.progress import is_terminal, make_bar
from hapi_protocol.printable import printable


@contextmanager
def bars_hidden(stream: TextIO) -> Iterator[None]:
    """Hides all tqdm bars while the caller writes to ``stream``."""
    # If tqdm is not (completely) imported, there is no bar.
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is None:
        yield
        return
    with tqdm.external_write_mode(file=stream):
        yield


class TqdmLogHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """A log handler that writes above tqdm's bars.

    ``tqdm.contrib.logging`` replaces the handlers of a logger for as long as
    a bar is shown, and so loses those that a program adds meanwhile.
    """

    def emit(self, record: logging.LogRecord) -> None:
        with bars_hidden(self.stream):
            super().emit(record)


class ConsoleReporter:
    """Shows notes, and on a terminal bars of files, on standard error.

    Use it as a context manager.
    """

    def __init__(self) -> None:
        self._bar: Any = None

    def __enter__(self) -> ConsoleReporter:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_bar()

    def reading(
        self, file: BinaryIO, description: str, length_bytes: int
    ) -> BinaryIO:
        """Shows how much of ``file`` was read until the next call."""
        self._close_bar()
        if not is_terminal(sys.stderr):
            return file
        bar = self._bar = make_bar(
            desc=description, total=length_bytes, unit="B", unit_scale=True
        )
        from tqdm.utils import CallbackIOWrapper

        # A repeated request reads the file again from its beginning.
        wrapped = CallbackIOWrapper(
            lambda _: bar.update(file.tell() - bar.n), file, "read"
        )
        return cast(BinaryIO, wrapped)

    def note(self, text: str) -> None:
        self._close_bar()
        with bars_hidden(sys.stderr):
            sys.stderr.write(f"{printable(text)}\n")
            sys.stderr.flush()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class TqdmSafeStream:
    """Replaces ``sys.stdout`` while bars are shown on the same terminal.

    Complete lines are printed above the bars. An incomplete line that is
    flushed (a prompt) hides the bars until it ends; ``tqdm.write`` and
    ``tqdm.contrib.DummyTqdmFile`` would overwrite or withhold it.
    """

    def __init__(self) -> None:
        self._stream: TextIO = sys.stdout
        self._lock = threading.RLock()
        self._incomplete_line = ""
        self._is_closed = False
        # Not None while the bars are hidden.
        self._hidden_bars: ExitStack | None = None
        if is_terminal(self._stream):
            sys.stdout = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def has_incomplete_line(self) -> bool:
        """True while an incomplete line is shown and bars are hidden."""
        return self._hidden_bars is not None

    def write(self, text: str) -> int:
        with self._lock:
            if self._is_closed:
                return self._stream.write(text)
            lines, end, rest = (self._incomplete_line + text).rpartition("\n")
            self._incomplete_line = rest
            if end:
                self._write(lines + end)
                self._show_bars()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            if self._incomplete_line:
                self._write(self._incomplete_line)
                self._incomplete_line = ""
        self._stream.flush()

    def _write(self, text: str) -> None:
        if self._hidden_bars is None:
            from tqdm import tqdm

            self._hidden_bars = ExitStack()
            self._hidden_bars.enter_context(
                # Without tqdm's lock: the line may stay incomplete for long.
                tqdm.external_write_mode(file=sys.stderr, nolock=True)
            )
        self._stream.write(text)
        self._stream.flush()

    def _show_bars(self) -> None:
        if self._hidden_bars is not None:
            self._hidden_bars.close()
            self._hidden_bars = None

    def end(self) -> None:
        """Restores ``sys.stdout``; references to this object still work."""
        with self._lock:
            if self._is_closed:
                return
            self.flush()
            self._is_closed = True
            # Streams below this one may have ended before it.
            while (
                isinstance(sys.stdout, TqdmSafeStream)
                and sys.stdout._is_closed
            ):
                sys.stdout = sys.stdout._stream
