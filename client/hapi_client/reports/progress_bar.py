"""How far a pass over the data is, in one line on a terminal.

The line is tqdm's, below those of the user's own bars. It vanishes when the
pass ends, however it does; what the user prints meanwhile stands above it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from hapi_client.reports.epoch_recorder import Line, NoLine, PlanStatus
from hapi_client.reports.terminal import (
    TqdmLogHandler,
    TqdmSafeStream,
    is_terminal,
)
from hapi_client.swift.traffic_counters import Traffic
from hapi_protocol.errors import ClientError

ENVIRONMENT = "HAPI_PROGRESS"
REDRAW_SECONDS = 0.2
SMOOTHING = 0.3
"""Of the newest interval in the moving averages of rates, as tqdm has it."""
PLAN_WIDTH = 40
BAR_FORMAT = (
    "{desc} |{bar}| {n_fmt}/{total_fmt}, {remaining} left, "
    "{rate_noinv_fmt}{postfix}"
)


def progress_wanted(
    progress: bool | None, environ: Mapping[str, str]
) -> bool | None:
    """Whether lines are shown; None where there is somebody to see them.

    Args:
        progress: what a program says; None leaves it to the environment.
        environ: with ``HAPI_PROGRESS``, or without.

    Raises:
        ClientError: ``bad_configuration`` for a value that is none.
    """
    if progress is not None:
        return progress
    value = environ.get(ENVIRONMENT) or None
    if value not in (None, "0", "1"):
        raise ClientError(
            "bad_configuration",
            f"{ENVIRONMENT} is {value!r}; 0 shows no progress, 1 shows it "
            "also without a terminal, and unset where there is one",
        )
    return None if value is None else value == "1"


def open_line(
    name: str,
    samples: int,
    *,
    wanted: bool | None,
    in_force: Callable[[], PlanStatus],
    traffic: Traffic,
) -> Line:
    """A line for one pass, or nothing.

    Args:
        name: of the pass.
        samples: that are to come.
        wanted: as of :func:`progress_wanted`.
        in_force: the present plan.
        traffic: over the wire.
    """
    if wanted is None:
        wanted = _is_watched()
    if not wanted or _is_loader_worker():
        return NoLine()
    return ProgressLine(name, samples, in_force, traffic)


def _is_loader_worker() -> bool:
    from torch.utils.data import get_worker_info

    return get_worker_info() is not None


def _is_watched() -> bool:
    return is_terminal(sys.stderr) or _is_notebook()


def _is_notebook() -> bool:
    # As tqdm.autonotebook asks, but without an import.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in shell.config


class ProgressLine:
    """A line that is shown until it is closed.

    ::

        epoch 3 |████  | 1440/3200, 00:15 left, 118.20 samples/s, 3.4 MB/s,
        limit link, cut 42 · float16

    Args:
        name: of the pass.
        samples: that are to come.
        in_force: the present plan.
        traffic: over the wire.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        samples: int,
        in_force: Callable[[], PlanStatus],
        traffic: Traffic,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # It takes a while, and only this needs it.
        from tqdm.std import EMA

        self._in_force = in_force
        self._traffic = traffic
        self._clock = clock
        self._lock = threading.RLock()
        self._bytes_before, self._seconds_before = self._bytes(), clock()
        self._new_bytes, self._new_seconds = EMA(SMOOTHING), EMA(SMOOTHING)
        self._undrawn = 0
        self._bar = _bar_class()(
            total=samples,
            desc=name,
            unit=" samples",
            bar_format=BAR_FORMAT,
            smoothing=SMOOTHING,
            mininterval=0,
            miniters=1,
            leave=False,
            dynamic_ncols=True,
            postfix=self._postfix(0.0),
            file=sys.stderr,
        )
        self._beside = TqdmSafeStream()
        self._log = _OwnWarnings()

    def add(self, samples: int) -> None:
        """Notes samples; draws a few times a second."""
        self._undrawn += samples
        now = self._clock()
        seconds = now - self._seconds_before
        if seconds < REDRAW_SECONDS or self._beside.has_open_line:
            return
        self._seconds_before = now
        before, self._bytes_before = self._bytes_before, self._bytes()
        rate = self._new_bytes(self._bytes_before - before)
        rate /= self._new_seconds(seconds)
        with self._lock:
            self._bar.set_postfix_str(self._postfix(rate), refresh=False)
            self._bar.update(self._undrawn)
        self._undrawn = 0

    def close(self) -> None:
        with self._lock:
            self._log.end()
            self._beside.end()
            self._bar.close()

    def _bytes(self) -> int:
        return self._traffic.count().total_bytes

    def _postfix(self, bytes_per_second: float) -> str:
        now = self._in_force()
        parts = [f"{bytes_per_second / 1e6:.1f} MB/s"]
        if now.binding:
            parts.append(f"limit {' + '.join(now.binding)}")
        plan = now.label
        if len(plan) > PLAN_WIDTH:
            plan = f"{plan[: PLAN_WIDTH - 1]}…"
        return ", ".join([*parts, plan])


def _bar_class() -> Any:
    from tqdm.auto import tqdm

    # No thread of tqdm's own, which would outlive the line.
    return type("Bar", (tqdm,), {"monitor_interval": 0})


class _OwnWarnings:
    """Shows our warnings above the line, where a program has set up no log:
    Python would write them into it."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("hapi_client")
        self._handler = TqdmLogHandler()
        self._handler.setLevel(logging.WARNING)
        if not self._logger.hasHandlers():
            self._logger.addHandler(self._handler)

    def end(self) -> None:
        self._logger.removeHandler(self._handler)
