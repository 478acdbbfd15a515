"""Memory queue: models that wait for memory of a device.

A load is queued when a job needs a model that is not in memory, until a job
has a lease of the model, or for a while after the last request.  The first
load of a device *blocks* it after a grace period: leases that would take its
memory are refused.  A turn puts the other loads of its account last.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hapi_protocol.job_messages import ModelIdentity
from hapi_worker.models.uploads import GRACE_SECONDS, RETRY_SECONDS

if TYPE_CHECKING:
    from hapi_worker.models.device_memory import DeviceMemory

QUEUED_LOAD_SECONDS = 2 * RETRY_SECONDS
"""Lifetime of a queued load after its last request; a caller that retries as
advised still finds it."""
LOAD_GRACE_SECONDS = 8.0
"""Time for which a first load blocks no jobs.  It starts again when a load is
served, so that a loaded model is used for a while."""
HEAD_SECONDS = 60.0
"""Time for which a load blocks its device.  Then it pauses for as long,
because jobs that do not end hold its memory."""
MAX_LOADS_PER_ACCOUNT = 16
"""Equals the default of ``max_streams``: each job with a model of its own."""


@dataclass(eq=False)
class QueuedLoad:
    """A model that waits for memory.

    Attributes:
        account: account of the model.
        device: device whose memory it waits for.
        since: monotonic seconds; later if its account had a turn.
        until: end of its lifetime, unless that is extended.
        digest: digest of its package, or empty.
        num_bytes: needed bytes, as far as they are known.
        is_loading: its package was requested, as there is memory.
    """

    account: str
    device: DeviceMemory
    since: float
    until: float = math.inf
    digest: str = ""
    num_bytes: int = 0
    is_loading: bool = False


@dataclass
class MemoryQueue:
    """The queued loads of all devices.

    All methods are called with the lock of ``changed`` held.

    Args:
        clock: monotonic seconds.
        changed: guards the queue, the devices and the models.
    """

    clock: Callable[[], float] = time.monotonic
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._loads: dict[ModelIdentity, QueuedLoad] = {}
        self._last_served: dict[DeviceMemory, float] = {}
        self.generation = 0
        """Raised whenever memory of a device becomes free."""

    def freed(self) -> None:
        """Wakes who waits for memory."""
        self.generation += 1
        self.changed.notify_all()

    def loads(self) -> dict[ModelIdentity, QueuedLoad]:
        """The queued loads; those whose lifetime has ended are forgotten."""
        now = self.clock()
        self._loads = {
            identity: load
            for identity, load in self._loads.items()
            if now < load.until and load.device.in_service
        }
        return self._loads

    def can_load(
        self,
        identity: ModelIdentity,
        digest: str,
        needed_bytes: int,
        devices: Sequence[DeviceMemory],
    ) -> bool:
        """Returns True if the model can be loaded now; if not, queues it.

        Args:
            identity: identity of the model.
            digest: digest of its package, or empty.
            needed_bytes: memory for its parameters and one sample.
            devices: devices in service, the best for the model first.
        """
        if not any(needed_bytes <= device.limit_bytes for device in devices):
            # It never fits, or no device is left; the load will say so.
            return True
        self.request(identity, digest, needed_bytes, devices)
        load = self.loads().get(identity)
        if load is None:
            return False
        load.is_loading = False
        for device in sorted(devices, key=lambda d: d is not load.device):
            first = self.head(device)
            needed = load.num_bytes + sum(
                other.num_bytes
                for other in self._on(device)
                if other is not load and (other.is_loading or other is first)
            )
            if needed <= device.limit_bytes - device.held_bytes(digest):
                load.device, load.is_loading = device, True
                self.extend(identity, GRACE_SECONDS)
                return True
        return False

    def request(
        self,
        identity: ModelIdentity,
        digest: str,
        needed_bytes: int,
        devices: Sequence[DeviceMemory],
    ) -> None:
        """Queues a load, or keeps it queued; arguments see
        :meth:`can_load`."""
        fitting = [d for d in devices if needed_bytes <= d.limit_bytes]
        if identity not in self.loads() and fitting:
            account = identity.account
            others = [w for w in self._loads.values() if w.account == account]
            if len(others) < MAX_LOADS_PER_ACCOUNT:
                load = QueuedLoad(account, fitting[0], self.clock())
                self._loads[identity] = load
        self.extend(identity, QUEUED_LOAD_SECONDS, digest, needed_bytes)

    def extend(
        self,
        identity: ModelIdentity,
        seconds: float,
        digest: str = "",
        needed_bytes: int = 0,
    ) -> None:
        """Extends the lifetime of a queued load, if there is one.

        Args:
            identity: identity of the model.
            seconds: lifetime from now on.
            digest: digest of its package, if it is known now.
            needed_bytes: lower bound of its memory.
        """
        load = self.loads().get(identity)
        if load is not None:
            load.until = self.clock() + seconds
            load.digest = digest or load.digest
            needed_bytes = max(needed_bytes, load.num_bytes)
            load.num_bytes = min(needed_bytes, load.device.limit_bytes)

    def end(self, identity: ModelIdentity, *, served: bool) -> None:
        """Ends a queued load, if there is one.

        Args:
            identity: identity of the model.
            served: it has its memory; otherwise it is not needed any more.
        """
        load = self.loads().get(identity)
        if load is None:
            return
        if load is self.head(load.device):
            # The account had its turn.
            self._postpone(load.account, self.clock())
            if served:
                self._last_served[load.device] = self.clock()
        # It may have expired since.
        self._loads.pop(identity, None)
        self.freed()

    def head(self, device: DeviceMemory) -> QueuedLoad | None:
        """Returns the first load of a device."""
        loads = self._on(device)
        return min(loads, key=lambda load: load.since, default=None)

    def blocking(self, device: DeviceMemory) -> QueuedLoad | None:
        """Returns the load for which other jobs must leave memory."""
        head = self.head(device)
        if head is None:
            return None
        now = self.clock()
        served = self._last_served.get(device, -math.inf)
        waited = now - max(head.since, served)
        if waited >= LOAD_GRACE_SECONDS + HEAD_SECONDS:
            self._postpone(head.account, now + HEAD_SECONDS)
            return None
        return head if waited >= LOAD_GRACE_SECONDS else None

    def _postpone(self, account: str, since: float) -> None:
        for load in self._loads.values():
            if load.account == account:
                load.since = max(load.since, since)

    def _on(self, device: DeviceMemory) -> list[QueuedLoad]:
        return [w for w in self.loads().values() if w.device is device]
