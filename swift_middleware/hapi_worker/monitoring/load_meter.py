"""Load of the worker in the last ten seconds, for the summary of a job.

Time is divided into slots and only the last ones are kept, so memory does not
grow with the work.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from hapi_protocol.summary import WorkerLoad

WINDOW_SECONDS = 10.0
NUM_SLOTS = 20
"""Errors of the window are at most a slot: 5 %."""
SLOT_SECONDS = WINDOW_SECONDS / NUM_SLOTS
MAX_ACCOUNTS = 10_000
"""Accounts that are remembered; more would hardly change a share."""

Clock = Callable[[], float]


class BusyWindow:
    """Fraction of the last seconds that was spent on work; not thread-safe.

    Times are monotonic seconds and never decrease.

    Args:
        now: start of the measurement.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._slots: OrderedDict[int, float] = OrderedDict()

    def add(self, start: float, end: float) -> None:
        """Adds work from ``start`` to ``end``."""
        width = SLOT_SECONDS
        last = int(end // width)
        for slot in range(max(int(start // width), self._oldest(end)), last):
            self._add(slot, (slot + 1) * width - max(start, slot * width))
        self._add(last, end - max(start, last * width))
        self._forget(end)

    def fraction(self, now: float, *, num_at_once: int = 1) -> float:
        """Returns the busy fraction of the window, 0 to 1.

        Args:
            now: end of the window.
            num_at_once: pieces of work that can run at the same time.
        """
        self._forget(now)
        since = max(self._oldest(now) * SLOT_SECONDS, self._began)
        if now <= since:
            return 0.0
        busy = sum(self._slots.values())
        return min(busy / ((now - since) * num_at_once), 1.0)

    def _oldest(self, now: float) -> int:
        return int(now // SLOT_SECONDS) - NUM_SLOTS + 1

    def _add(self, slot: int, seconds: float) -> None:
        self._slots[slot] = self._slots.get(slot, 0.0) + seconds

    def _forget(self, now: float) -> None:
        oldest = self._oldest(now)
        for slot in [s for s in self._slots if s < oldest]:
            del self._slots[slot]


class RateWindow:
    """Rate of a counter over the last seconds; not thread-safe."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float]] = deque()

    def note(self, now: float, count: float) -> None:
        """Records a reading of the counter, at most once per slot."""
        readings = self._readings
        # One reading stays: it is all there is after a long idle time.
        while len(readings) > 1 and readings[0][0] < now - WINDOW_SECONDS:
            readings.popleft()
        if self.is_due(now):
            readings.append((now, count))

    def is_due(self, now: float) -> bool:
        """Returns True if a reading now would be recorded."""
        readings = self._readings
        return not readings or now - readings[-1][0] >= SLOT_SECONDS

    def per_second(self, now: float, count: float) -> float:
        """Returns the rate since the oldest reading, 0 without one."""
        self.note(now, count)
        since, before = self._readings[0]
        return (count - before) / (now - since) if now > since else 0.0


class Accounts:
    """Accounts that had work in the last seconds; not thread-safe."""

    def __init__(
        self, weight: Callable[[str], float] = lambda account: 1.0
    ) -> None:
        self._weight = weight
        self._seen: OrderedDict[str, float] = OrderedDict()

    def note(self, now: float, account: str) -> None:
        """Records that the account has work now."""
        self._seen[account] = now
        self._seen.move_to_end(account)
        while len(self._seen) > MAX_ACCOUNTS or (
            next(iter(self._seen.values())) < now - WINDOW_SECONDS
        ):
            self._seen.popitem(last=False)

    def share(self, now: float, account: str) -> float:
        """Returns the account's fair share, as if it has work now."""
        self.note(now, account)
        weights = {name: self._weight(name) for name in self._seen}
        return weights[account] / sum(weights.values())


@dataclass(eq=False)
class Work:
    """A running piece of work."""

    account: str
    started: float
    on_device: bool


@dataclass(eq=False)
class LoadMeter:
    """Measures the pools' work for the summaries of jobs; thread-safe.

    Args:
        cores: cores that this process may use.
        num_devices: passes that can run at the same time.
        weight: returns the weight of an account.
        clock: monotonic seconds.
        cpu_clock: CPU seconds of the process.
    """

    _: KW_ONLY
    cores: float
    num_devices: int = 1
    weight: Callable[[str], float] = lambda account: 1.0
    clock: Clock = time.monotonic
    cpu_clock: Clock = time.process_time

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Work] = set()
        self._device = BusyWindow(self.clock())
        self._cpu = RateWindow()
        self._cpu.note(self.clock(), self.cpu_clock())
        self._accounts = Accounts(self.weight)

    def start_work(self, account: str, *, on_device: bool) -> Work:
        """Records the start of work; pass the result to :meth:`end_work`."""
        with self._lock:
            now = self._note(account)
            work = Work(account, now, on_device)
            self._running.add(work)
            return work

    def end_work(self, work: Work) -> None:
        with self._lock:
            now = self._note(work.account)
            self._running.discard(work)
            if work.on_device:
                self._device.add(work.started, now)

    def report(self, account: str, streams: int) -> WorkerLoad:
        """Returns the load as one account sees it.

        Args:
            account: the charged account.
            streams: the account's running and waiting jobs.
        """
        with self._lock:
            now = self.clock()
            for work in self._running:
                self._accounts.note(now, work.account)
                if work.on_device:
                    # Its time until now must not be counted again later.
                    self._device.add(work.started, now)
                    work.started = now
            cpu = self._cpu.per_second(now, self.cpu_clock()) / self.cores
            return WorkerLoad(
                share=self._accounts.share(now, account),
                streams=streams,
                device_busy=self._device.fraction(
                    now, num_at_once=self.num_devices
                ),
                cpu_busy=min(max(cpu, 0.0), 1.0),
            )

    def _note(self, account: str) -> float:
        now = self.clock()
        self._accounts.note(now, account)
        # Reading this clock visits all threads of the process.
        if self._cpu.is_due(now):
            self._cpu.note(now, self.cpu_clock())
        return now
