"""Text of strangers for logs and terminals.

Names of objects, accounts and samples may hold any character.  A line break
would forge a line of a log, and an escape sequence would control the terminal
that shows it.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TypeAlias

_ExcInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None]
    | tuple[None, None, None]
)


def printable(text: str) -> str:
    """Returns one line in which other characters are escaped, as by repr."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


class LineFormatter(logging.Formatter):
    """A log formatter whose messages are one printable line each.

    The lines of a traceback are indented, so that none looks like a message.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: _ExcInfo) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {printable(line)}" for line in lines)
