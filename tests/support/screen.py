"""Screen of a terminal after some bytes: enough for progress bars."""

from __future__ import annotations

import io
import re

_PIECES = re.compile(r"\x1b\[\??(\d*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Terminal(io.StringIO):
    """A file that calls itself a terminal."""

    def isatty(self) -> bool:
        return True


def shown(text: str) -> list[str]:
    """The lines of a wide screen, without what is blank at their ends."""
    lines = [""]
    row = column = 0
    for number, command, control, words in _PIECES.findall(text):
        if words:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + words + line[column + len(words) :]
            column += len(words)
        elif control == "\r":
            column = 0
        elif control == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif command == "A":
            row = max(0, row - int(number or 1))
        elif command == "K":
            lines[row] = lines[row][:column]
    return [line.rstrip() for line in lines]
