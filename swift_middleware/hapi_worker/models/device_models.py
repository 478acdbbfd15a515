"""The models in one device's memory.

All cuts of a model share its parameters.  Models with a lease stay in memory;
idle ones are evicted, least recently used first, when memory is needed.

The limit covers the parameters of all models, the working memory of all
running forward passes and, on a CPU, that of decoding large images.  A model
that is being loaded counts from the start, but is copied to the device only
when the running passes leave enough memory: these do not wait for it, and new
ones get less.
"""

from __future__ import annotations

import gc
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import nn

from hapi_protocol.encodings import Encoding
from hapi_protocol.errors import DoesNotFitError
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.profiling.memory_model import (
    MemoryRequirement,
    memory_requirement,
)
from hapi_worker.models.loaded_model import (
    CutDtype,
    LoadedModel,
    check_cut,
    does_not_fit_error,
    touch,
)
from hapi_worker.models.memory_queue import MemoryQueue
from hapi_worker.models.uploads import too_busy_error
from hapi_worker.models.working_memory import WorkingMemory

MAX_PREFIXES = 4
"""Maximum number of cuts whose modules a model keeps."""
MAX_REQUIREMENTS = 64
"""Maximum number of cuts whose memory requirements a model keeps."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class DeviceModels:
    """The models of one device.

    Args:
        device: device of the parameters.
        limit_bytes: limit of all parameters and all running passes together.
        num_forwards: maximum number of passes at a time.
        preferred_batch: samples of a pass if memory suffices; idle models
            are evicted to make that possible.
        wait_seconds: how long the copy of a model waits for running passes.
        pass_seconds: longest allowed duration of a pass.
        queue: models that wait for memory, of all devices of a worker; its
            ``changed`` is the lock of this object.
    """

    device: torch.device
    limit_bytes: int
    _: KW_ONLY
    num_forwards: int = 1
    preferred_batch: int = 1
    wait_seconds: float = 60.0
    pass_seconds: float = math.inf
    queue: MemoryQueue = field(default_factory=MemoryQueue)

    def __post_init__(self) -> None:
        self.in_service = True
        self.guarded: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context for work on the device; the executor detects failures."""
        self._changed = self.queue.changed
        self._clock = self.queue.clock
        self._loaded: OrderedDict[str, LoadedModel] = OrderedDict()
        self._loading: dict[str, int] = {}
        self._evicted = False
        self._building = threading.Lock()
        self.working_memory = WorkingMemory(self)

    def loaded_totals(self) -> tuple[int, int]:
        """Number of models in memory, and bytes of their parameters."""
        with self._changed:
            return len(self._loaded), self.model_bytes()

    def models(self) -> list[tuple[str, int, int]]:
        """Digest, parameter bytes and jobs of each model in memory."""
        with self._changed:
            return [
                (r.digest, r.parameter_bytes, len(r.leases))
                for r in self._loaded.values()
            ]

    def leases(self) -> list[Lease]:
        """All leases; call it with the lock held."""
        return [lease for r in self._loaded.values() for lease in r.leases]

    def has(self, loaded: LoadedModel) -> bool:
        """True if that copy of a model is in memory; call it with the lock
        held."""
        return self._loaded.get(loaded.digest) is loaded

    def find(self, digest: str) -> LoadedModel | None:
        """Returns a model and marks it as used; call it with the lock held."""
        model = self._loaded.get(digest)
        if model is not None:
            self._loaded.move_to_end(digest)
        return model

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

    def sample_bytes(self, digest: str) -> int:
        """Returns the bytes of a model and one sample at a requested cut.

        0 if unknown.  Call it with the lock held.
        """
        loaded = self._loaded.get(digest)
        if loaded is None:
            return 0
        needed = [needs.peak_bytes(1) for needs in loaded.needs.values()]
        # Cuts that need more than the limit are refused.
        return max((n for n in needed if n <= self.limit_bytes), default=0)

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

    def leave_service(self) -> None:
        """Forgets all models of a failed device."""
        with self._changed:
            self.in_service = False
            self._loaded.clear()
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
        usual = needs.peak_bytes(self.preferred_batch) - loaded.parameter_bytes
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

    def held_bytes(self, but: str, also: LoadedModel | None = None) -> int:
        """Bytes of leased and loading models and of their passes.

        Call it with the lock held.

        Args:
            but: digest of a model that is not counted.
            also: a model that is counted even without a lease.
        """
        held = [
            loaded
            for loaded in self._loaded.values()
            if (loaded.leases or loaded is also) and loaded.digest != but
        ]
        loading = [n for digest, n in self._loading.items() if digest != but]
        working = max((model.working_bytes for model in held), default=0)
        return sum(r.parameter_bytes for r in held) + sum(loading) + working

    def used_bytes(self) -> int:
        """Bytes of models and of decoding; call it with the lock held."""
        return self.model_bytes() + self.working_memory.decoding_bytes

    def model_bytes(self) -> int:
        """Bytes of parameters, also of loading models; call it with the lock
        held."""
        loaded = sum(r.parameter_bytes for r in self._loaded.values())
        return loaded + sum(self._loading.values())

    def check_service(self) -> None:
        """Raises an error if the device has failed."""
        if not self.in_service:
            raise too_busy_error("queue_full", "the device has left service")

    def make_room(
        self,
        parameter_bytes: int,
        working_bytes: int,
        keep: LoadedModel | None = None,
    ) -> None:
        """Evicts idle models until both sizes fit next to leased models; call
        it with the lock held.

        The model at the head of the load queue stays.
        """
        working = [r.working_bytes for r in self._loaded.values()]
        needed = parameter_bytes + max(working_bytes, *working, 0)
        first = self.queue.head(self)
        stays = first.digest if first else ""
        idle = [
            loaded
            for loaded in self._loaded.values()
            if not loaded.leases
            and loaded is not keep
            and loaded.digest != stays
        ]
        while idle and self.limit_bytes - self.used_bytes() < needed:
            self._evict(idle.pop(0))
        available = self.limit_bytes - self.used_bytes()
        if available < needed:
            raise too_busy_error(
                "queue_full",
                f"running jobs hold the memory: {needed} bytes are needed, "
                f"{available} available",
                needed_bytes=needed,
                available_bytes=available,
            )

    def _leave_room(self, working_bytes: int, keep: LoadedModel) -> None:
        """Evicts idle models that would make passes smaller than usual.

        Idle models may always use half of the memory.
        """
        wanted = min(working_bytes, self.limit_bytes // 2)
        awaited = {load.digest for load in self.queue.loads().values()}
        for idle in list(self._loaded.values()):
            if self.limit_bytes - self.used_bytes() >= wanted:
                return
            if (
                not idle.leases
                and idle is not keep
                and idle.digest not in awaited
            ):
                self._evict(idle)

    def _evict(self, loaded: LoadedModel) -> None:
        logger.info("model %s leaves memory", loaded.digest[:12])
        del self._loaded[loaded.digest]
        self._evicted = True

    def _empty_cache(self) -> None:
        """Returns the memory of evicted models to the device.

        Call it without the lock: the device may have to finish its work.
        """
        with self._changed:
            evicted, self._evicted = self._evicted, False
        if not evicted:
            return
        # Tracebacks and graphs are reference cycles that contain models.
        gc.collect()
        if self.device.type == "cuda":
            with self.guarded():
                torch.cuda.empty_cache()


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
