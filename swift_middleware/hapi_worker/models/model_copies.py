"""The copies of models on the devices of a worker."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hapi_protocol.errors import DoesNotFitError, HapiError, UnavailableError
from hapi_splitter.cuts import FrozenGraph
from hapi_worker.models.device_memory import DeviceMemory
from hapi_worker.models.device_models import DeviceModels, Lease
from hapi_worker.models.loaded_model import LoadedModel
from hapi_worker.models.uploads import too_busy_error

SPREAD_JOBS = 2
"""A device without the model is preferred if it has this many jobs fewer: the
copy costs less than waiting for them."""

_T = TypeVar("_T")


@dataclass(eq=False)
class ModelCopies:
    """The copies of models on the devices of a worker.

    Args:
        devices: the models of each device.
        changed: the lock of all devices.
        wait_seconds: longest wait for another thread that loads or copies
            the same model.
    """

    devices: Sequence[DeviceModels]
    changed: threading.Condition
    wait_seconds: float

    def __post_init__(self) -> None:
        self._in_progress: set[str] = set()

    def find(
        self, digest: str, devices: Iterable[DeviceModels] | None = None
    ) -> LoadedModel | None:
        """Returns a copy of a model, on one of some devices or of all."""
        with self.changed:
            devices = self.devices if devices is None else devices
            copies = [device.find(digest) for device in devices]
            return next(filter(None, copies), None)

    def devices_for(self, digest: str) -> list[DeviceModels]:
        """Returns the devices in service, the best for a model first."""
        with self.changed:
            return devices_in_order(self.devices, digest)

    def lease(self, digest: str, cut: int, encoding: str) -> Lease | None:
        """Leases on the best device that has memory; None if the model was
        evicted."""

        def hold(device: DeviceModels) -> Lease | None:
            lease = device.hold(digest, cut, encoding)
            if lease is None and self._copy(digest, device):
                lease = device.hold(digest, cut, encoding)
            return lease

        return _first_success(self.devices_for(digest), hold)

    def _copy(self, digest: str, target: DeviceModels) -> bool:
        """Copies a model from another device; returns False without one."""
        # A copy from a device that hangs would not end.
        on_time = [
            device
            for device in self.devices
            if not device.working_memory.has_late_pass
        ]
        with self.exclusive(digest):
            source = self.find(digest, on_time)
            if source is None:
                return False
            target.add(digest, source.frozen, source.load_seconds)
            return True

    def place(
        self,
        digest: str,
        frozen: FrozenGraph,
        load_seconds: float,
        preferred: DeviceMemory | None,
    ) -> LoadedModel:
        """Adds a model to the first device that takes it.

        Args:
            digest: digest of its package.
            frozen: the model.
            load_seconds: seconds already spent on loading it.
            preferred: device with memory for it.

        Raises:
            HapiError: the refusal of a device, or none is in service.
        """
        devices = self.devices_for(digest)
        devices.sort(key=lambda device: device is not preferred)
        loaded = _first_success(
            devices, lambda device: device.add(digest, frozen, load_seconds)
        )
        if loaded is None:
            raise too_busy_error("queue_full", "no device is in service")
        return loaded

    @contextlib.contextmanager
    def exclusive(self, digest: str) -> Iterator[None]:
        """Lets one thread at a time load or copy a model."""
        with self.changed:
            if not self.changed.wait_for(
                lambda: digest not in self._in_progress, self.wait_seconds
            ):
                raise too_busy_error(
                    "worker_unavailable",
                    "the same package is still being loaded for another "
                    "request",
                )
            self._in_progress.add(digest)
        try:
            yield
        finally:
            with self.changed:
                self._in_progress.discard(digest)
                self.changed.notify_all()


def devices_in_order(
    devices: Sequence[DeviceModels], digest: str
) -> list[DeviceModels]:
    """Returns the devices in service, the best for a model first.

    This is the least busy one that has the model, unless another one is less
    busy by :data:`SPREAD_JOBS`.  Devices with a late pass come last: the pass
    may never end.
    """

    def cost(device: DeviceModels) -> tuple[bool, float]:
        # Half a job less: at equal cost a device with the model is first.
        missing = 0.0 if device.find(digest) else SPREAD_JOBS - 0.5
        late = device.working_memory.has_late_pass
        return late, len(device.leases()) + missing

    return sorted(
        (device for device in devices if device.in_service), key=cost
    )


def _first_success(
    devices: Iterable[DeviceModels],
    action: Callable[[DeviceModels], _T | None],
) -> _T | None:
    """Returns the first result of an action on one of the devices.

    Raises:
        HapiError: one of the devices' refusals, if possible one that a retry
            may cure.
    """
    refusal: HapiError | None = None
    for device in devices:
        try:
            result = action(device)
        except (UnavailableError, DoesNotFitError) as error:
            if not isinstance(refusal, UnavailableError):
                refusal = error
        else:
            if result is not None:
                return result
    try:
        if refusal is not None:
            raise refusal
    finally:
        # Its traceback refers to this frame and to models.
        del refusal
    return None
