"""The memory of one device: which models are in it, and which leave.

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
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

import torch

from hapi_worker.models.loaded_model import LoadedModel
from hapi_worker.models.memory_queue import MemoryQueue
from hapi_worker.models.uploads import too_busy_error
from hapi_worker.models.working_memory import WorkingMemory

if TYPE_CHECKING:
    from hapi_worker.models.device_models import Lease

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class DeviceMemory:
    """The memory of one device.

    Args:
        device: device of the parameters.
        limit_bytes: limit of all parameters and all running passes together.
        num_forwards: maximum number of passes at a time.
        largest_batch: samples of a pass if memory suffices; idle models
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
    largest_batch: int = 1
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

    def leave_service(self) -> None:
        """Forgets all models of a failed device."""
        with self._changed:
            self.in_service = False
            self._loaded.clear()
            self.queue.freed()

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
