"""A progress bar for each epoch on a terminal.

The bar is tqdm's, below the user's own bars. It vanishes when the epoch ends
or fails; prints and warnings of the meantime stay above it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hapi_client.progress import is_terminal, make_bar
from hapi_client.reports.terminal import (
    TqdmLogHandler,
    TqdmSafeStream,
)
from hapi_client.swift.traffic_counters import Traffic

REDRAW_SECONDS = 0.2
SMOOTHING = 0.3
"""Smoothing weight of the newest interval in moving averages of rates."""
MAX_PLAN_CHARACTERS = 40
BAR_FORMAT = (
    "{desc} |{bar}| {n_fmt}/{total_fmt}, {remaining} left, "
    "{rate_noinv_fmt}{postfix}"
)


@dataclass(frozen=True)
class PlanStatus:
    """The plan in use, or how samples are read without one.

    Attributes:
        label: for people.
        samples_per_second: predicted throughput; None without a plan.
        binding: resources that limit the throughput.
        num_changes: number of plans so far.
    """

    label: str = "stream"
    samples_per_second: float | None = None
    binding: tuple[str, ...] = ()
    num_changes: int = 0


def start_progress_bar(
    name: str,
    num_samples: int,
    *,
    wanted: bool | None,
    plan_status: Callable[[], PlanStatus],
    traffic: Traffic,
) -> TqdmProgressBar | None:
    """Starts the progress bar of an epoch; returns None to show nothing.

    On a terminal or in a notebook, unless ``HAPI_PROGRESS`` says otherwise;
    :meth:`.FeaturePipeline.loader_of_share` leaves it to the first rank.

    Args:
        name: name of the epoch.
        num_samples: remaining samples of the epoch.
        wanted: from :func:`progress_wanted`.
        plan_status: returns the present plan.
        traffic: bytes over the wire.
    """
    if wanted is None:
        wanted = is_terminal(sys.stderr) or _is_notebook()
    if not wanted or _is_loader_worker():
        return None
    return TqdmProgressBar(name, num_samples, plan_status, traffic)


def _is_loader_worker() -> bool:
    from torch.utils.data import get_worker_info

    return get_worker_info() is not None


def _is_notebook() -> bool:
    # The test of tqdm.autonotebook, without importing anything.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in shell.config


class TqdmProgressBar:
    """A bar with throughput, traffic, limiting resource and plan.

    ::

        epoch 3 |████  | 1440/3200, 00:15 left, 118.20 samples/s, 3.4 MB/s,
        limit link, cut 42 · float16

    Args:
        name: name of the epoch.
        num_samples: remaining samples of the epoch.
        plan_status: returns the present plan.
        traffic: bytes over the wire.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        num_samples: int,
        plan_status: Callable[[], PlanStatus],
        traffic: Traffic,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Imported late: it takes a while, and only bars need it.
        from tqdm.std import EMA

        self._plan_status = plan_status
        self._traffic = traffic
        self._clock = clock
        self._lock = threading.RLock()
        self._bytes_before, self._seconds_before = self._num_bytes(), clock()
        self._mean_bytes, self._mean_seconds = EMA(SMOOTHING), EMA(SMOOTHING)
        self._undrawn_samples = 0
        self._bar = make_bar(
            desc=name,
            total=num_samples,
            unit=" samples",
            bar_format=BAR_FORMAT,
            smoothing=SMOOTHING,
            mininterval=0,
            miniters=1,
            postfix=self._postfix(0.0),
        )
        self._stdout = TqdmSafeStream()
        self._warnings = _WarningsAboveBars()

    def add(self, samples: int) -> None:
        """Counts samples; draws at most once in ``REDRAW_SECONDS``."""
        self._undrawn_samples += samples
        now = self._clock()
        seconds = now - self._seconds_before
        if seconds < REDRAW_SECONDS or self._stdout.has_incomplete_line:
            return
        self._seconds_before = now
        before, self._bytes_before = self._bytes_before, self._num_bytes()
        bytes_per_second = self._mean_bytes(self._bytes_before - before)
        bytes_per_second /= self._mean_seconds(seconds)
        with self._lock:
            postfix = self._postfix(bytes_per_second)
            self._bar.set_postfix_str(postfix, refresh=False)
            self._bar.update(self._undrawn_samples)
        self._undrawn_samples = 0

    def close(self) -> None:
        with self._lock:
            self._warnings.end()
            self._stdout.end()
            self._bar.update(self._undrawn_samples)
            self._bar.close()

    def _num_bytes(self) -> int:
        return self._traffic.count().total_bytes

    def _postfix(self, bytes_per_second: float) -> str:
        status = self._plan_status()
        parts = [f"{bytes_per_second / 1e6:.1f} MB/s"]
        if status.binding:
            parts.append(f"limit {' + '.join(status.binding)}")
        plan = status.label
        if len(plan) > MAX_PLAN_CHARACTERS:
            plan = f"{plan[: MAX_PLAN_CHARACTERS - 1]}…"
        return ", ".join([*parts, plan])


class _WarningsAboveBars:
    """Shows our warnings above bars if the program configured no logging.

    Python's handler of last resort would write them into the bar.
    """

    def __init__(self) -> None:
        self._logger = logging.getLogger("hapi_client")
        self._handler = TqdmLogHandler()
        self._handler.setLevel(logging.WARNING)
        if not self._logger.hasHandlers():
            self._logger.addHandler(self._handler)

    def end(self) -> None:
        self._logger.removeHandler(self._handler)
