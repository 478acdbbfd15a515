"""Working memory of one device: forward passes and decoding of large images.

A pass reserves its working memory before it begins, by max-min fair grants;
one sample always fits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hapi_worker.models.loaded_model import (
    CutDtype,
    Reservation,
    does_not_fit_error,
)
from hapi_worker.models.uploads import too_busy_error
from hapi_worker.scheduling.max_min_grants import granted_bytes

if TYPE_CHECKING:
    from hapi_worker.models.device_memory import DeviceMemory
    from hapi_worker.models.device_models import Lease

CAP_SECONDS = 600.0
"""Seconds for which a batch that ran out of memory is not tried again."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class WorkingMemory:
    """The working memory of one device; guarded by the lock of its models.

    Args:
        models: the models of the device.

    Attributes:
        decoding_bytes: memory of images that are decoded.
    """

    models: DeviceMemory

    def __post_init__(self) -> None:
        self.decoding_bytes = 0
        self._changed = self.models.queue.changed
        self._clock = self.models.queue.clock
        self._reserved: list[Reservation] = []
        self._waiting_passes: list[Callable[[], None]] = []

    def reserved_bytes(self) -> int:
        """Working memory of the running passes."""
        with self._changed:
            return sum(r.num_bytes for r in self._reserved)

    def longest_pass_seconds(self) -> float:
        """Duration so far of the oldest running pass; 0 without one."""
        with self._changed:
            now = self._clock()
            started = (r.started for r in self._reserved)
            return now - min(started, default=now)

    @property
    def has_late_pass(self) -> bool:
        """True if a pass has been running for longer than allowed."""
        return self.longest_pass_seconds() > self.models.pass_seconds

    def batch_limit(self, lease: Lease, maximum: int) -> int:
        """Largest batch of a pass, see :meth:`Lease.batch_limit`."""
        with self._changed:
            others = self.models.model_bytes() - lease.loaded.parameter_bytes
            available = self.models.limit_bytes - others
            maximum = self._capped(lease, maximum)
            return max(lease.needs.batch_for(available, maximum), 1)

    @contextmanager
    def reserve_alone(self, lease: Lease, maximum: int) -> Iterator[int]:
        """Reserves working memory while no other pass runs.

        Yields the batch, as :meth:`batch_limit` returns it.
        """
        with self._changed:
            batch = self.batch_limit(lease, maximum)
            made = self._made(lease, batch)
        try:
            yield batch
        finally:
            self.free(made)

    def reserve(
        self, lease: Lease, maximum: int, retry: Callable[[], None]
    ) -> Reservation | None:
        """Reserves working memory for a pass of up to ``maximum`` samples.

        Args:
            lease: lease of the job that runs the pass.
            maximum: size of the group's micro-batches.
            retry: called once if None was returned, when a running pass has
                ended and it is this caller's turn.

        Returns:
            None if running passes leave too little for one sample, or if
            other callers already wait: they are served first.
        """
        with self._changed:
            if self._waiting_passes and self._waiting_passes[0] != retry:
                self._wait_for_memory(retry)
                return None
            maximum = self._capped(lease, maximum)
            capacity = self.models.limit_bytes - self.models.used_bytes()
            share = granted_bytes(
                _working(lease, maximum),
                self._other_demands(lease, maximum),
                capacity,
                self.models.num_forwards,
            )
            base = lease.loaded.parameter_bytes
            room = min(
                max(share, _working(lease, 1)), capacity - self._taken_bytes()
            )
            batch = lease.needs.batch_for(base + room, maximum)
            if batch < 1 and (self._reserved or self.decoding_bytes):
                self._wait_for_memory(retry)
                return None
            batch = max(batch, 1)
            made = self._made(lease, batch)
        self.cancel_wait(retry)
        return made

    def cancel_wait(self, retry: Callable[[], None]) -> None:
        """Stops waiting for memory, and lets the next caller try."""
        with self._changed:
            if retry not in self._waiting_passes:
                return
            self._waiting_passes.remove(retry)
            following = self._waiting_passes[:1]
        for waiter in following:
            waiter()

    def free(self, reservation: Reservation) -> None:
        """Gives working memory back."""
        with self._changed:
            self._reserved.remove(reservation)
            retry = self._waiting_passes[:1]
            self.models.queue.freed()
        for notify in retry:
            notify()

    @contextmanager
    def decoding(self, num_bytes: int) -> Iterator[None]:
        """Counts the memory of decoding an image in its block.

        Waits until it fits.  Images may use half of the limit together.

        Raises:
            DoesNotFitError: the image needs more than that.
            UnavailableError: other images, jobs or passes hold the memory.
        """
        share = self.models.limit_bytes // 2
        if num_bytes > share:
            raise does_not_fit_error("decoding an image", num_bytes, share)
        with self._changed:
            if not self._changed.wait_for(
                lambda: self.decoding_bytes + num_bytes <= share,
                self.models.wait_seconds,
            ):
                raise too_busy_error("queue_full", "images hold the memory")
            self.models.make_room(num_bytes, 0)
            self.decoding_bytes += num_bytes
        try:
            self.await_passes()
            yield
        finally:
            with self._changed:
                self.decoding_bytes -= num_bytes
                retry = self._waiting_passes[:1]
                self.models.queue.freed()
            for notify in retry:
                notify()

    def record_out_of_memory(self, lease: Lease, batch: int) -> None:
        """Lowers the batch limit after a pass ran out of memory."""
        cap = max(batch // 2, 1)
        with self._changed:
            until = self._clock() + CAP_SECONDS
            lease.loaded.caps[lease.cut_dtype] = cap, until
        logger.warning(
            "model %s up to cut %d: no memory for %d samples; %d from now on",
            lease.digest[:12],
            lease.cut,
            batch,
            cap,
        )

    def _made(self, lease: Lease, batch: int) -> Reservation:
        made = Reservation(
            batch, _working(lease, batch), lease.loaded, self._clock()
        )
        self._reserved.append(made)
        return made

    def _wait_for_memory(self, retry: Callable[[], None]) -> None:
        if retry not in self._waiting_passes:
            self._waiting_passes.append(retry)

    def _capped(self, lease: Lease, maximum: int) -> int:
        cap, until = lease.loaded.caps.get(lease.cut_dtype, (maximum, 0.0))
        return min(cap, maximum) if self._clock() < until else maximum

    def _other_demands(self, lease: Lease, maximum: int) -> list[int]:
        """Demands of passes at all other leased cuts, each counted once."""
        demands: dict[tuple[str, CutDtype], int] = {}
        for other in self.models.leases():
            key = other.digest, other.cut_dtype
            demands[key] = _working(other, maximum)
        demands.pop((lease.digest, lease.cut_dtype), None)
        return list(demands.values())

    def _taken_bytes(self) -> int:
        """Bytes of running passes: working memory, and the parameters of
        models that were evicted while a pass still used them."""
        evicted = {
            id(reservation.loaded): reservation.loaded.parameter_bytes
            for reservation in self._reserved
            if not self.models.has(reservation.loaded)
        }
        working = sum(r.num_bytes for r in self._reserved)
        return working + sum(evicted.values())

    def await_passes(self) -> None:
        """Waits until running passes and all models, also loading ones, fit.

        Raises:
            UnavailableError: the passes do not end, or the device has failed.
        """
        with self._changed:
            if not self._changed.wait_for(
                self._has_room, self.models.wait_seconds
            ):
                raise too_busy_error("queue_full", "passes hold the memory")
            self.models.check_service()

    def _has_room(self) -> bool:
        needed = self.models.used_bytes() + self._taken_bytes()
        return needed <= self.models.limit_bytes or not self.models.in_service


def _working(lease: Lease, batch: int) -> int:
    return lease.needs.peak_bytes(batch) - lease.loaded.parameter_bytes
