"""How busy this worker has been of late, for the closing summary of a job.

A sliding window of about ten seconds.  Time is divided into slots of which
the last few are kept, so memory does not grow with the work.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from hapi_protocol.summary import Load

WINDOW_SECONDS = 10.0
NUM_SLOTS = 20
MAX_ACCOUNTS = 10_000
"""Accounts with work inside a window; more would not change anybody's share
by much."""

Clock = Callable[[], float]


class BusyWindow:
    """The fraction of the last seconds that was spent on work.

    Not thread-safe.  Moments are monotonic seconds, and never fall.

    Args:
        now: when the window begins to know anything.
        window_seconds: how far it looks back, to within a slot.
    """

    def __init__(
        self, now: float, *, window_seconds: float = WINDOW_SECONDS
    ) -> None:
        self._slot_seconds = window_seconds / NUM_SLOTS
        self._began = now
        self._slots: OrderedDict[int, float] = OrderedDict()

    def add(self, start: float, end: float) -> None:
        """Work lasted from ``start`` to ``end``."""
        width = self._slot_seconds
        last = int(end // width)
        for slot in range(max(int(start // width), self._oldest(end)), last):
            self._add(slot, (slot + 1) * width - max(start, slot * width))
        self._add(last, end - max(start, last * width))
        self._forget(end)

    def fraction(self, now: float, *, num_at_once: int = 1) -> float:
        """Busy by all time, 0 to 1.

        Args:
            now: the end of the window.
            num_at_once: pieces of work that can run at the same time.
        """
        self._forget(now)
        since = max(self._oldest(now) * self._slot_seconds, self._began)
        if now <= since:
            return 0.0
        busy = sum(self._slots.values())
        return min(busy / ((now - since) * num_at_once), 1.0)

    def _oldest(self, now: float) -> int:
        return int(now // self._slot_seconds) - NUM_SLOTS + 1

    def _add(self, slot: int, seconds: float) -> None:
        self._slots[slot] = self._slots.get(slot, 0.0) + seconds

    def _forget(self, now: float) -> None:
        oldest = self._oldest(now)
        for slot in [s for s in self._slots if s < oldest]:
            del self._slots[slot]


class RateWindow:
    """How fast a counter has risen in the last seconds; not thread-safe."""

    def __init__(self, *, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window = window_seconds
        self._readings: deque[tuple[float, float]] = deque()

    def note(self, now: float, count: float) -> None:
        """The counter stood at ``count``; kept at most once per slot."""
        readings = self._readings
        # The last one is kept: it is all that is known after a long idle time.
        while len(readings) > 1 and readings[0][0] < now - self._window:
            readings.popleft()
        if self.is_due(now):
            readings.append((now, count))

    def is_due(self, now: float) -> bool:
        """Whether a reading would be kept."""
        readings = self._readings
        gap = self._window / NUM_SLOTS
        return not readings or now - readings[-1][0] >= gap

    def per_second(self, now: float, count: float) -> float:
        """Since the oldest reading of the window, 0 without one."""
        self.note(now, count)
        since, before = self._readings[0]
        return (count - before) / (now - since) if now > since else 0.0


class Accounts:
    """Accounts that had work in the last seconds; not thread-safe."""

    def __init__(
        self,
        *,
        weight: Callable[[str], float] = lambda account: 1.0,
        window_seconds: float = WINDOW_SECONDS,
    ) -> None:
        self._weight = weight
        self._window = window_seconds
        self._seen: OrderedDict[str, float] = OrderedDict()

    def note(self, now: float, account: str) -> None:
        """The account has work now."""
        self._seen[account] = now
        self._seen.move_to_end(account)
        while len(self._seen) > MAX_ACCOUNTS or (
            next(iter(self._seen.values())) < now - self._window
        ):
            self._seen.popitem(last=False)

    def share(self, now: float, account: str) -> float:
        """Of all that was to be had; the account counts as one with work."""
        self.note(now, account)
        weights = {name: self._weight(name) for name in self._seen}
        return weights[account] / sum(weights.values())


@dataclass(eq=False)
class Work:
    """A piece of work that a pool runs."""

    account: str
    started: float
    on_device: bool


class LoadMeter:
    """What the pools tell, and what a summary says of it; thread-safe.

    Args:
        cores: that this process may use.
        num_devices: forwards that can run at the same time.
        weight: of an account.
        clock: monotonic seconds.
        cpu_clock: CPU seconds of the process.
    """

    def __init__(
        self,
        *,
        cores: float,
        num_devices: int = 1,
        weight: Callable[[str], float] = lambda account: 1.0,
        clock: Clock = time.monotonic,
        cpu_clock: Clock = time.process_time,
    ) -> None:
        self._cores = cores
        self._num_devices = num_devices
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._lock = threading.Lock()
        self._running: set[Work] = set()
        self._device = BusyWindow(clock())
        self._cpu = RateWindow()
        self._cpu.note(clock(), cpu_clock())
        self._accounts = Accounts(weight=weight)

    def began(self, account: str, *, on_device: bool) -> Work:
        """A pool begins work; to be given back to :meth:`ended`."""
        with self._lock:
            now = self._note(account)
            work = Work(account, now, on_device)
            self._running.add(work)
            return work

    def ended(self, work: Work) -> None:
        with self._lock:
            now = self._note(work.account)
            self._running.discard(work)
            if work.on_device:
                self._device.add(work.started, now)

    def report(self, account: str, streams: int) -> Load:
        """The load as one account sees it.

        Args:
            account: that is charged.
            streams: of it that run now or wait for a place.
        """
        with self._lock:
            now = self._clock()
            for work in self._running:
                self._accounts.note(now, work.account)
                if work.on_device:
                    # What it has done until now is counted here, not later.
                    self._device.add(work.started, now)
                    work.started = now
            cpu = self._cpu.per_second(now, self._cpu_clock()) / self._cores
            return Load(
                share=self._accounts.share(now, account),
                streams=streams,
                device_busy=self._device.fraction(
                    now, num_at_once=self._num_devices
                ),
                cpu_busy=min(max(cpu, 0.0), 1.0),
            )

    def _note(self, account: str) -> float:
        now = self._clock()
        self._accounts.note(now, account)
        # The clock goes through all threads of the process.
        if self._cpu.is_due(now):
            self._cpu.note(now, self._cpu_clock())
        return now
