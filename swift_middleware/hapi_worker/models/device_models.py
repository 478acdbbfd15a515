"""The models of one device, and the leases of jobs.

All cuts of a model share its parameters.  Models with a lease stay in memory;
idle ones are evicted, least recently used first, when memory is needed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import nn

from hapi_protocol.encodings import Encoding
from hapi_protocol.errors import DoesNotFitError
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.profiling.memory_model import (
    MemoryRequirement,
    memory_requirement,
)
from hapi_worker.models.device_memory import DeviceMemory
from hapi_worker.models.loaded_model import (
    CutDtype,
    LoadedModel,
    check_cut,
    does_not_fit_error,
    touch,
)
from hapi_worker.models.uploads import too_busy_error

MAX_PREFIXES = 4
"""Maximum number of cuts whose modules a model keeps."""
MAX_REQUIREMENTS = 64
"""Maximum number of cuts whose memory requirements a model keeps."""


@dataclass(eq=False)
class DeviceModels(DeviceMemory):
    """The models of one device, and the leases of jobs.

    Args: see :class:`.DeviceMemory`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._building = threading.Lock()

    def hold(self, digest: str, cut: int, encoding: str) -> Lease | None:
        """Returns a lease of a model for a cut; None if it is not in memory.

        Raises:
            UnsupportedError: ``cut_out_of_range``, ``does_not_fit``.
            UnavailableError: running jobs hold the memory.
        """
        lease = self._hold(
            digest, CutDtype(cut, Encoding.parse(encoding).dtype)
        )
        self._empty_cache()
        return lease

    def _hold(self, digest: str, cut_dtype: CutDtype) -> Lease | None:
        computed: tuple[LoadedModel, MemoryRequirement] | None = None
        while True:
            with self._changed:
                loaded = self.find(digest)
                if loaded is None:
                    return None
                check_cut(loaded, cut_dtype.cut)
                if computed is not None and computed[0] is loaded:
                    loaded.needs[cut_dtype] = computed[1]
                if cut_dtype in loaded.needs:
                    touch(loaded.needs, cut_dtype, MAX_REQUIREMENTS)
                    return self._lease(loaded, cut_dtype)
            # Takes long for a large model: without the lock.
            computed = loaded, memory_requirement(loaded.frozen, *cut_dtype)

    def add(
        self, digest: str, frozen: FrozenGraph, load_seconds: float
    ) -> LoadedModel:
        """Moves a model to the device, unless it is there already.

        Args:
            digest: digest of its package.  The caller makes sure that no
                other thread adds the same model.
            frozen: the model, on any device.
            load_seconds: seconds already spent on checking and loading it.

        Raises:
            DoesNotFitError: it is larger than ``limit_bytes``.
            UnavailableError: running jobs hold the memory.
        """
        started = self._clock()
        size = frozen.parameter_bytes
        self.check_size(f"the model {digest[:12]}", size)
        with self._changed:
            model = self.find(digest)
            if model is not None:
                return model
            # The memory is taken before the copy to the device, not after.
            self.make_room(size, 0)
            self._loading[digest] = size
        try:
            self.working_memory.await_passes()
            self._empty_cache()
            with self.guarded():
                moved = frozen.to(self.device)
        except BaseException as error:
            with self._changed:
                del self._loading[digest]
                self.queue.freed()
            if isinstance(error, (DoesNotFitError, torch.OutOfMemoryError)):
                # It should fit: others use more than they have reserved.
                raise too_busy_error("queue_full", str(error)) from error
            raise
        loaded = LoadedModel(digest, moved, size)
        loaded.load_seconds = load_seconds + self._clock() - started
        with self._changed:
            del self._loading[digest]
            self.check_service()
            self._loaded[digest] = loaded
            self._changed.notify_all()
        return loaded

    def check_size(self, what: str, num_bytes: int) -> None:
        """Refuses what can never fit.

        Raises:
            DoesNotFitError: it is larger than ``limit_bytes``.
        """
        if num_bytes > self.limit_bytes:
            raise does_not_fit_error(what, num_bytes, self.limit_bytes)

    def prefix(self, loaded: LoadedModel, cut: int) -> nn.Module:
        """Returns the module of a cut, built once."""
        with self._building:
            if cut not in loaded.prefixes:
                loaded.prefixes[cut] = loaded.frozen.prefix(cut)
            touch(loaded.prefixes, cut, MAX_PREFIXES)
            return loaded.prefixes[cut]

    def release(self, lease: Lease) -> None:
        """Ends a lease, see :meth:`Lease.release`."""
        with self._changed:
            lease.loaded.leases.pop(lease, None)
            self.queue.freed()

    def _lease(self, loaded: LoadedModel, cut_dtype: CutDtype) -> Lease:
        needs = loaded.needs[cut_dtype]
        needed = needs.peak_bytes(1)
        self.check_size(
            f"one sample up to cut {cut_dtype.cut} of the model "
            f"{loaded.digest[:12]}",
            needed,
        )
        self._check_load_queue(loaded)
        working = needed - loaded.parameter_bytes
        self.make_room(0, working, keep=loaded)
        usual = needs.peak_bytes(self.largest_batch) - loaded.parameter_bytes
        self._leave_room(self.num_forwards * usual, keep=loaded)
        lease = Lease(self, loaded, cut_dtype, needs)
        loaded.leases[lease] = working
        return lease

    def _check_load_queue(self, loaded: LoadedModel) -> None:
        """Lets a load that has waited long go first.

        Raises:
            UnavailableError: a lease of this model would block that load.
        """
        due = self.queue.blocking(self)
        if due is None or due.digest == loaded.digest:
            return
        available = self.limit_bytes - self.held_bytes(due.digest, loaded)
        if available < due.num_bytes:
            raise too_busy_error(
                "queue_full",
                "a model that has waited longer needs the memory: "
                f"{due.num_bytes} bytes, {available} available next to this "
                "one",
                needed_bytes=due.num_bytes,
                available_bytes=available,
            )


@dataclass(eq=False)
class Lease:
    """Keeps a model in memory for one job until it is released.

    Attributes:
        device_models: models of the device.
        loaded: the model.
        needs: memory requirement up to the cut.
        cut_dtype: cut and dtype of the features.
        cut: cut of the job.
        digest: sha256 of the package.
        frozen: the model's layers, on the device.
    """

    device_models: DeviceModels
    loaded: LoadedModel
    cut_dtype: CutDtype
    needs: MemoryRequirement

    def __post_init__(self) -> None:
        self._prefix: nn.Module | None = None
        self.cut = self.cut_dtype.cut
        self.digest = self.loaded.digest
        self.frozen = self.loaded.frozen

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample's features at the cut."""
        return tuple(self.frozen.cuts[self.cut - 1].shape)

    @property
    def load_seconds(self) -> float:
        """Seconds that the model took to load."""
        return self.loaded.load_seconds

    def prefix(self) -> nn.Module:
        """``[B, *input_shape]`` → ``[B, *shape]``; thread-safe."""
        if self._prefix is None:
            self._prefix = self.device_models.prefix(self.loaded, self.cut)
        return self._prefix

    def batch_limit(self, maximum: int) -> int:
        """Maximum samples of a pass while nothing else runs, at least 1."""
        return self.device_models.working_memory.batch_limit(self, maximum)

    def release(self) -> None:
        """Ends the lease; further calls do nothing."""
        self.device_models.release(self)
