"""Profiles of models: measured once, cached, returned to each caller.

A profile is measured on a thread of the device, from the queue that is fair
between accounts; the account that requests it is charged.  One profile is
measured at a time, and all other threads of the pools pause, because their
work would be measured too.  Jobs wait; their streams stay open.  After each
profile, a worker with jobs measures none for nine times as long as it took, so
that profiles cannot block jobs for long.

Profiles outlive their model in memory: they are small, and bounded in number.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from hapi_protocol.errors import (
    HapiError,
    UnavailableError,
)
from hapi_protocol.job_messages import ModelIdentity, ProfileRequest
from hapi_protocol.profiles import ModelProfile
from hapi_splitter.numerics import numerics_tag
from hapi_worker.execution.device_executor import executor_of
from hapi_worker.jobs.admission import Admission
from hapi_worker.jobs.profile_runner import ProfileRunner
from hapi_worker.models.device_models import Lease
from hapi_worker.models.loaded_model import touch
from hapi_worker.models.registry import Models
from hapi_worker.models.uploads import copy_of_error, too_busy_error
from hapi_worker.monitoring.metrics import Metrics
from hapi_worker.scheduling.fair_pool import PROFILE

MAX_PROFILES = 256
"""Profiles in the cache; the least recently used one is dropped first."""
REST_RATIO = 9.0
"""Pause after a profile while jobs run, in multiples of its duration."""
MAX_WAITING = 4
"""Requests that wait for one run, the first included."""

Key = tuple[str, str, str]
"""Digest of the package, device, and numerics tag."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Run:
    """One requested profile; guarded by the condition."""

    key: Key
    lease: Lease
    num_waiting: int = 0
    started: bool = False
    cancelled: bool = False
    result: ModelProfile | HapiError | None = None


@dataclass(eq=False)
class Profiling:
    """The profiles of one worker's models.

    Args:
        models: the worker's models.
        runner: measures on the devices.
        admission: the worker's jobs.
        metrics: counts runs and requests.
        wait_seconds: longest wait of a request for its model and the run.
        clock: monotonic seconds.
    """

    models: Models
    runner: ProfileRunner
    admission: Admission
    metrics: Metrics
    _: KW_ONLY
    wait_seconds: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        # All devices are of one kind: a profile of one is valid for all.
        kind = self.runner.executors[0].device.type
        self._kind_and_tag = kind, numerics_tag(kind)
        self._changed = threading.Condition()
        self._cache: OrderedDict[Key, ModelProfile] = OrderedDict()
        self._run: _Run | None = None
        self._rests_until = 0.0
        self._closed = False

    def profile(self, request: ProfileRequest) -> ModelProfile:
        """Answers ``POST /profiles``.

        Raises:
            ConflictError: ``model_needed``: the caller must upload it.
            UnavailableError: ``queue_full`` while another model is
                profiled, too many requests wait, jobs have waited for a
                profile lately, or the device has no time; ``draining``.
            UnsupportedError: ``does_not_fit``, or the error of the upload
                it waited for.
            InternalError: the run failed.
        """
        try:
            return self._profile(request)
        except HapiError as error:
            self._count("refused", error.code)
            raise

    def close(self) -> None:
        """Ends all waiting; a run under way ends by its budget."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _profile(self, request: ProfileRequest) -> ModelProfile:
        deadline = self.clock() + self.wait_seconds
        known = self.models.known(request.model)
        if known is not None:
            measured = self._find(self._key(known.digest), deadline)
            if measured is not None:
                return measured
        with self._changed:
            self._check_idle()
        lease = self._lease(request.model, request.charged_account)
        key = self._key(lease.digest)
        measured = None
        try:
            # Another request may have measured it while the model loaded.
            measured = self._find(key, deadline)
            run = None if measured else self._begin(key, lease)
        except HapiError:
            lease.release()
            raise
        if run is None:
            lease.release()
            assert measured is not None, "found, or a run begun"
            return measured
        self._submit(request.charged_account, run)
        return self._wait(run, deadline)

    def _key(self, digest: str) -> Key:
        return digest, *self._kind_and_tag

    def _find(self, key: Key, deadline: float) -> ModelProfile | None:
        """Returns an earlier result, or that of the current run."""
        with self._changed:
            if key in self._cache:
                self._cache.move_to_end(key)
                self._count("kept")
                return self._cache[key]
            run = self._run
            if run is None or run.key != key:
                return None
            if run.num_waiting >= MAX_WAITING:
                raise too_busy_error(
                    "queue_full",
                    f"{run.num_waiting} requests wait for this profile",
                )
            self._count("joined")
        return self._wait(run, deadline)

    def _check_idle(self) -> None:
        if self._closed or self.admission.draining:
            raise too_busy_error("draining", "this worker is shutting down")
        if self._run is not None:
            raise too_busy_error(
                "queue_full", "another model is profiled at present"
            )
        left = self._rests_until - self.clock()
        if left > 0 and self.admission.num_running():
            raise UnavailableError(
                "queue_full",
                f"jobs run here that have waited for a profile; {left:.0f} s "
                "until they may have to again",
                retry_after=math.ceil(left),
            )

    def _lease(self, identity: ModelIdentity, account: str) -> Lease:
        # The number of cuts is known only when the model is loaded.
        first = self.models.acquire(identity, 1, account=account)
        last = first.frozen.num_cuts
        try:
            return self.models.acquire(identity, last, account=account)
        finally:
            first.release()

    def _begin(self, key: Key, lease: Lease) -> _Run:
        with self._changed:
            self._check_idle()
            self._run = _Run(key, lease)
            return self._run

    def _submit(self, account: str, run: _Run) -> None:
        try:
            executor_of(self.runner.executors, run.lease).pool.submit(
                account, lambda: self._measure(run), kind=PROFILE
            )
        except RuntimeError:
            with self._changed:
                self._finish(
                    run,
                    too_busy_error("draining", "this worker is shutting down"),
                )

    def _wait(self, run: _Run, deadline: float) -> ModelProfile:
        with self._changed:
            run.num_waiting += 1
            try:
                self._changed.wait_for(
                    lambda: run.result is not None or self._closed,
                    deadline - self.clock(),
                )
                if run.result is None and self._closed:
                    raise too_busy_error(
                        "draining", "this worker is shutting down"
                    )
                if run.result is None:
                    raise too_busy_error(
                        "queue_full",
                        "the device had no time for this profile in "
                        f"{self.wait_seconds:g} s",
                    )
            finally:
                run.num_waiting -= 1
                self._cancel_unwanted(run)
        if isinstance(run.result, HapiError):
            raise copy_of_error(run.result)
        return run.result

    def _cancel_unwanted(self, run: _Run) -> None:
        """Cancels a run that has not started if no request waits for it."""
        if run.result is None and not run.started and not run.num_waiting:
            run.cancelled = True
            self._finish(
                run, too_busy_error("queue_full", "nobody waited for it")
            )

    # --- the device's thread ---

    def _measure(self, run: _Run) -> None:
        with self._changed:
            if run.cancelled or self._closed:
                return
            run.started = True
        started = self.clock()
        result = self.runner.measure(run.lease)
        if isinstance(result, HapiError):
            self._count("failed", result.code)
        else:
            self._count("done")
        with self._changed:
            ended = self.clock()
            self._rests_until = ended + REST_RATIO * (ended - started)
            self._finish(run, result)

    def _finish(self, run: _Run, result: ModelProfile | HapiError) -> None:
        """Ends a run; called once, with the condition held."""
        run.result = result
        if self._run is run:
            self._run = None
        if isinstance(result, ModelProfile):
            self._cache[run.key] = result
            touch(self._cache, run.key, MAX_PROFILES)
        run.lease.release()
        self._changed.notify_all()

    def _count(self, outcome: str, reason: str = "") -> None:
        self.metrics.profiles.labels(outcome, reason).inc()
