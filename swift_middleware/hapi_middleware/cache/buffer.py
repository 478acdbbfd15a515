"""Memory of one process for cached features, shared by accounts.

Entries being read or stored are in memory as a whole.  Several entries of one
account get at most :data:`SHARE_OF_FREE` times what they leave for others, and
a client that reads its entry too slowly loses it if others need the memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

SHARE_OF_FREE = 3
"""An account alone gets three quarters of the memory, and another one that
comes still gets an entry in.  The value is a choice, not measured."""
SILENT_SECONDS = 10.0
"""Time in which a client must take the next piece."""
MIN_BYTES_PER_SECOND = 64 * 1024
"""Average rate at which a client must read."""


@dataclass(eq=False)
class Buffer:
    """Memory budget of one process.

    Args:
        limit_bytes: maximum of all reservations together.
        clock: monotonic seconds.
    """

    limit_bytes: int
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.reservations: set[BufferReservation] = set()
        """Those with memory."""

    @property
    def used_bytes(self) -> int:
        return sum(reservation.num_bytes for reservation in self.reservations)

    def reservation(self, account: str) -> BufferReservation:
        """Returns a reservation of an account, without memory yet."""
        return BufferReservation(self, account)


@dataclass(eq=False)
class BufferReservation:
    """The memory of one entry.

    Args:
        buffer: the budget.
        account: account whose share it is.

    Attributes:
        num_bytes: reserved memory.
    """

    buffer: Buffer
    account: str

    def __post_init__(self) -> None:
        self.num_bytes = 0
        self._started = self._last = self.buffer.clock()
        self._sent_bytes = 0
        self._break_off: Callable[[], None] | None = None

    def grow(self, num_bytes: int) -> bool:
        """Reserves more memory; returns False if there is not enough."""
        if not self._fits(num_bytes):
            for reservation in list(self.buffer.reservations):
                reservation._end_if_slow()
            if not self._fits(num_bytes):
                return False
        self.num_bytes += num_bytes
        self.buffer.reservations.add(self)
        return True

    def free(self) -> None:
        """Frees the memory.  Idempotent."""
        self.num_bytes = 0
        self.buffer.reservations.discard(self)

    def begin_sending(self, break_off: Callable[[], None]) -> None:
        """Records that a client reads the entry from now on.

        Args:
            break_off: ends the answer and frees the memory.
        """
        self._started = self._last = self.buffer.clock()
        self._break_off = break_off

    def sent(self, num_bytes: int) -> None:
        """Records that the client has taken a piece."""
        self._last = self.buffer.clock()
        self._sent_bytes += num_bytes

    def _fits(self, num_bytes: int) -> bool:
        buffer = self.buffer
        free = buffer.limit_bytes - buffer.used_bytes - num_bytes
        others = sum(
            reservation.num_bytes
            for reservation in buffer.reservations
            if reservation.account == self.account and reservation is not self
        )
        held = others + self.num_bytes + num_bytes
        return free >= 0 and (not others or held <= SHARE_OF_FREE * free)

    def _end_if_slow(self) -> None:
        now = self.buffer.clock()
        due = self._started + self._sent_bytes / MIN_BYTES_PER_SECOND
        is_slow = now > min(self._last, due) + SILENT_SECONDS
        if is_slow and self._break_off is not None:
            self._break_off()
