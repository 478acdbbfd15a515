"""Memory queue: models that wait for memory, by identity and device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hapi_protocol.job_messages import ModelIdentity
from hapi_worker.models.device_models import DeviceModels
from hapi_worker.models.load_queue import QueuedLoad
from hapi_worker.models.uploads import GRACE_SECONDS, RETRY_SECONDS

QUEUED_LOAD_SECONDS = 2 * RETRY_SECONDS
"""Lifetime of a queued load after its last request; a caller that retries as
advised still finds it."""


class MemoryQueue:
    """Queued loads by identity; all methods are called with the lock held.

    Args:
        devices: returns the devices in service, the best for a digest first.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        devices: Callable[[str], Sequence[DeviceModels]],
        clock: Callable[[], float],
    ) -> None:
        self._devices = devices
        self._clock = clock
        self._loads: dict[ModelIdentity, tuple[DeviceModels, QueuedLoad]] = {}

    def can_load(
        self, identity: ModelIdentity, digest: str, needed_bytes: int
    ) -> bool:
        """Returns True if the model can be loaded now; if not, queues it.

        Args:
            identity: identity of the model.
            digest: digest of its package, or empty.
            needed_bytes: memory for its parameters and one sample.
        """
        if not any(
            needed_bytes <= each.limit_bytes for each in self._devices(digest)
        ):
            # It never fits, or no device is left; the load will say so.
            return True
        self.request(identity, digest, needed_bytes)
        if identity not in self._loads:
            return False
        if not self._find_device(identity, digest):
            return False
        self.extend(identity, GRACE_SECONDS)
        return True

    def device_for(self, identity: ModelIdentity) -> DeviceModels | None:
        """Returns the device on which it is queued, if any."""
        queued = self._loads.get(identity)
        return queued and queued[0]

    def request(
        self, identity: ModelIdentity, digest: str, needed_bytes: int
    ) -> None:
        """Queues a load, or keeps it queued; arguments see
        :meth:`can_load`."""
        self.extend(identity, QUEUED_LOAD_SECONDS, digest)
        if identity in self._loads:
            self.grow(identity, needed_bytes)
            return
        for device_models in self._devices(digest):
            if needed_bytes <= device_models.limit_bytes:
                now = self._clock()
                request = QueuedLoad(
                    identity.account,
                    needed_bytes,
                    now,
                    now + QUEUED_LOAD_SECONDS,
                    digest,
                )
                if device_models.load_queue.add(request):
                    self._loads[identity] = device_models, request
                return

    def grow(self, identity: ModelIdentity, needed_bytes: int) -> None:
        """Raises the needed bytes of a queued load, if there is one."""
        if identity in self._loads:
            device_models, request = self._loads[identity]
            needed_bytes = max(needed_bytes, request.num_bytes)
            request.num_bytes = min(needed_bytes, device_models.limit_bytes)

    def extend(
        self, identity: ModelIdentity, seconds: float, digest: str = ""
    ) -> None:
        """Extends the lifetime of a queued load, if there is one.

        Args:
            identity: identity of the model.
            seconds: lifetime from now on.
            digest: digest of its package, if it is known now.
        """
        self._forget_expired()
        if identity in self._loads:
            _, request = self._loads[identity]
            request.until = self._clock() + seconds
            request.digest = digest or request.digest

    def served(self, identity: ModelIdentity) -> None:
        """Ends a queued load that has its memory."""
        if identity in self._loads:
            device_models, request = self._loads.pop(identity)
            device_models.served(request)

    def remove(self, identity: ModelIdentity) -> None:
        """Ends a queued load that is not needed any more."""
        if identity in self._loads:
            device_models, request = self._loads.pop(identity)
            device_models.load_queue.remove(request)

    def _find_device(self, identity: ModelIdentity, digest: str) -> bool:
        """Moves the load to a device with memory; returns False without
        one."""
        mine, request = self._loads[identity]
        if mine.has_memory_for(request):
            return True
        for other in self._devices(digest):
            if other is mine or not other.load_queue.add(request):
                continue
            if other.has_memory_for(request):
                mine.load_queue.remove(request)
                self._loads[identity] = other, request
                return True
            other.load_queue.withdraw(request)
        return False

    def _forget_expired(self) -> None:
        now = self._clock()
        lapsed = [
            identity
            for identity, (device_models, request) in self._loads.items()
            if request.until <= now or not device_models.in_service
        ]
        for identity in lapsed:
            self.remove(identity)
