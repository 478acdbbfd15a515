"""The interface by which library functions report long work."""

from __future__ import annotations

from typing import BinaryIO, Protocol


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
