"""The log of a command, on standard error."""

from __future__ import annotations

import logging
import sys


class BesideBars(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes above a progress line, where one is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        # Where nobody has imported it, there is no line.
        tqdm = sys.modules.get("tqdm")
        if tqdm is None:
            super().emit(record)
            return
        with tqdm.tqdm.external_write_mode(file=self.stream):
            super().emit(record)
