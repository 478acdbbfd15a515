"""The models in one device's memory, and the working memory of their passes.

All cuts of a model share its parameters.  Models with a lease stay in memory;
idle ones are evicted, least recently used first, when memory is needed.

The limit covers the parameters of all models, the working memory of all
running forward passes and, on a CPU, that of decoding large images.  A pass
reserves its working memory before it begins, by max-min fair grants; one
sample always fits.  A model that is being loaded counts from the start, but is
copied to the device only when the running passes leave enough memory: these do
not wait for it, and new ones get less.
"""

from __future__ import annotations

import gc
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

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
    Reservation,
    check_cut,
    does_not_fit_error,
    touch,
)
from hapi_worker.models.memory_queue import MemoryQueue
from hapi_worker.models.uploads import too_busy_error
from hapi_worker.scheduling.max_min_grants import granted_bytes

MAX_PREFIXES = 4
"""Maximum number of cuts whose modules a model keeps."""
MAX_REQUIREMENTS = 64
"""Maximum number of cuts whose memory requirements a model keeps."""
CAP_SECONDS = 600.0
"""Seconds for which a batch that ran out of memory is not tried again."""

logger = logging.getLogger(__name__)


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

    def __init__(
        self,
        device: torch.device,
        limit_bytes: int,
        *,
        num_forwards: int = 1,
        preferred_batch: int = 1,
        wait_seconds: float = 60.0,
        pass_seconds: float = math.inf,
        queue: MemoryQueue | None = None,
    ) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self.in_service = True
        self.guarded: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context for work on the device; the executor detects failures."""
        self.generation = 0
        """Raised whenever memory becomes free."""
        self._num_forwards = num_forwards
        self.preferred_batch = preferred_batch
        self._wait_seconds = wait_seconds
        self.pass_seconds = pass_seconds
        self.queue = queue or MemoryQueue()
        self._changed = self.queue.changed
        self._clock = self.queue.clock
        self._loaded: OrderedDict[str, LoadedModel] = OrderedDict()
        self._loading: dict[str, int] = {}
        self._decoding_bytes = 0
        self._reserved: list[Reservation] = []
        self._waiting_passes: list[Callable[[], None]] = []
        self._evicted = False
        self._building = threading.Lock()

    def loaded_totals(self) -> tuple[int, int]:
        """Number of models in memory, and bytes of their parameters."""
        with self._changed:
            return len(self._loaded), self._model_bytes()

    def models(self) -> list[tuple[str, int, int]]:
        """Digest, parameter bytes and jobs of each model in memory."""
        with self._changed:
            return [
                (r.digest, r.parameter_bytes, len(r.leases))
                for r in self._loaded.values()
            ]

    def num_jobs(self) -> int:
        """Number of leases of all models."""
        with self._changed:
            return sum(len(r.leases) for r in self._loaded.values())

    def reserved_bytes(self) -> int:
        """Working memory of the running passes."""
        with self._changed:
            return sum(each.num_bytes for each in self._reserved)

    def longest_pass_seconds(self) -> float:
        """Duration so far of the oldest running pass; 0 without one."""
        with self._changed:
            now = self._clock()
            return max(
                (now - each.started for each in self._reserved), default=0
            )

    @property
    def has_late_pass(self) -> bool:
        """True if a pass has been running for longer than allowed."""
        return self.longest_pass_seconds() > self.pass_seconds

    def find(self, digest: str) -> LoadedModel | None:
        """Returns a model and marks it as used; call it with the lock held."""
        found = self._loaded.get(digest)
        if found is not None:
            self._loaded.move_to_end(digest)
        return found

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
        self._check_size(digest, size)
        with self._changed:
            found = self.find(digest)
            if found is not None:
                return found
            # The memory is taken before the copy to the device, not after.
            self._make_room(size, 0)
            self._loading[digest] = size
        try:
            self._await_passes()
            self._empty_cache()
            with self.guarded():
                moved = frozen.to(self.device)
        except BaseException as error:
            with self._changed:
                del self._loading[digest]
                self.freed()
            if isinstance(error, (DoesNotFitError, torch.OutOfMemoryError)):
                # It should fit: others use more than they have reserved.
                raise too_busy_error("queue_full", str(error)) from error
            raise
        loaded = LoadedModel(digest, moved, size)
        loaded.load_seconds = load_seconds + self._clock() - started
        with self._changed:
            del self._loading[digest]
            self._check_service()
            self._loaded[digest] = loaded
            self._changed.notify_all()
        return loaded

    def check_length(self, what: str, length_bytes: int) -> None:
        """Refuses a package that can never fit.

        Raises:
            DoesNotFitError: it is longer than ``limit_bytes``.
        """
        if length_bytes > self.limit_bytes:
            raise does_not_fit_error(what, length_bytes, self.limit_bytes)

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

    def batch_limit(self, lease: Lease, maximum: int) -> int:
        """Largest batch of a pass, see :meth:`Lease.batch_limit`."""
        with self._changed:
            return self._batch_limit(lease, maximum)

    @contextmanager
    def reserve_alone(self, lease: Lease, maximum: int) -> Iterator[int]:
        """Reserves working memory while no other pass runs.

        Yields the batch, as :meth:`batch_limit` returns it.
        """
        with self._changed:
            batch = self._batch_limit(lease, maximum)
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
            maximum: number of waiting samples.
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
            capacity = self.limit_bytes - self._used_bytes()
            share = granted_bytes(
                _working(lease, maximum),
                self._other_demands(lease, maximum),
                capacity,
                self._num_forwards,
            )
            base = lease.loaded.parameter_bytes
            room = min(
                max(share, _working(lease, 1)), capacity - self._taken_bytes()
            )
            batch = lease.needs.batch_for(base + room, maximum)
            if batch < 1 and (self._reserved or self._decoding_bytes):
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
        for each in following:
            each()

    def free(self, reservation: Reservation) -> None:
        """Gives working memory back."""
        with self._changed:
            self._reserved.remove(reservation)
            retry = self._waiting_passes[:1]
            self.freed()
        for each in retry:
            each()

    @contextmanager
    def decoding(self, num_bytes: int) -> Iterator[None]:
        """Counts the memory of decoding an image in its block.

        Waits until it fits.  Images may use half of the limit together.

        Raises:
            DoesNotFitError: the image needs more than that.
            UnavailableError: other images, jobs or passes hold the memory.
        """
        share = self.limit_bytes // 2
        if num_bytes > share:
            raise does_not_fit_error("decoding an image", num_bytes, share)
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._decoding_bytes + num_bytes <= share,
                self._wait_seconds,
            ):
                raise too_busy_error("queue_full", "images hold the memory")
            self._make_room(num_bytes, 0)
            self._decoding_bytes += num_bytes
        try:
            self._await_passes()
            yield
        finally:
            with self._changed:
                self._decoding_bytes -= num_bytes
                retry = self._waiting_passes[:1]
                self.freed()
            for each in retry:
                each()

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
            self.freed()

    def leave_service(self) -> None:
        """Forgets all models of a failed device."""
        with self._changed:
            self.in_service = False
            self._loaded.clear()
            self.freed()

    def freed(self) -> None:
        """Wakes who waits for memory; call it with the lock held."""
        self.generation += 1
        self._changed.notify_all()

    def _batch_limit(self, lease: Lease, maximum: int) -> int:
        others = self._model_bytes() - lease.loaded.parameter_bytes
        available = self.limit_bytes - others
        batch = lease.needs.batch_for(available, self._capped(lease, maximum))
        return max(batch, 1)

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
        for loaded in self._loaded.values():
            for other in loaded.leases:
                key = loaded.digest, other.cut_dtype
                demands[key] = _working(other, maximum)
        demands.pop((lease.digest, lease.cut_dtype), None)
        return list(demands.values())

    def _lease(self, loaded: LoadedModel, cut_dtype: CutDtype) -> Lease:
        needs = loaded.needs[cut_dtype]
        needed = needs.peak_bytes(1)
        if needed > self.limit_bytes:
            raise does_not_fit_error(
                f"one sample up to cut {cut_dtype.cut} of the model "
                f"{loaded.digest[:12]}",
                needed,
                self.limit_bytes,
            )
        self._check_load_queue(loaded)
        working = needed - loaded.parameter_bytes
        self._make_room(0, working, keep=loaded)
        usual = needs.peak_bytes(self.preferred_batch) - loaded.parameter_bytes
        self._leave_room(self._num_forwards * usual, keep=loaded)
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
        working = max((each.working_bytes for each in held), default=0)
        return sum(r.parameter_bytes for r in held) + sum(loading) + working

    def _check_size(self, digest: str, size: int) -> None:
        if size > self.limit_bytes:
            raise does_not_fit_error(
                f"the model {digest[:12]}", size, self.limit_bytes
            )

    def _used_bytes(self) -> int:
        return self._model_bytes() + self._decoding_bytes

    def _model_bytes(self) -> int:
        loaded = sum(r.parameter_bytes for r in self._loaded.values())
        return loaded + sum(self._loading.values())

    def _taken_bytes(self) -> int:
        """Bytes of running passes: working memory, and the parameters of
        models that were evicted while a pass still used them."""
        evicted = {
            id(each.loaded): each.loaded.parameter_bytes
            for each in self._reserved
            if self._loaded.get(each.loaded.digest) is not each.loaded
        }
        working = sum(each.num_bytes for each in self._reserved)
        return working + sum(evicted.values())

    def _await_passes(self) -> None:
        """Waits until running passes and all models, also loading ones, fit.

        Raises:
            UnavailableError: the passes do not end, or the device has failed.
        """
        with self._changed:
            if not self._changed.wait_for(self._has_room, self._wait_seconds):
                raise too_busy_error("queue_full", "passes hold the memory")
            self._check_service()

    def _has_room(self) -> bool:
        needed = self._used_bytes() + self._taken_bytes()
        return needed <= self.limit_bytes or not self.in_service

    def _check_service(self) -> None:
        if not self.in_service:
            raise too_busy_error("queue_full", "the device has left service")

    def _make_room(
        self,
        parameter_bytes: int,
        working_bytes: int,
        keep: LoadedModel | None = None,
    ) -> None:
        """Evicts idle models until both sizes fit next to leased models.

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
        while idle and self.limit_bytes - self._used_bytes() < needed:
            self._evict(idle.pop(0))
        available = self.limit_bytes - self._used_bytes()
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
            if self.limit_bytes - self._used_bytes() >= wanted:
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


def _working(lease: Lease, batch: int) -> int:
    return lease.needs.peak_bytes(batch) - lease.loaded.parameter_bytes


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

    def __init__(
        self,
        device_models: DeviceModels,
        loaded: LoadedModel,
        cut_dtype: CutDtype,
        needs: MemoryRequirement,
    ) -> None:
        self.device_models = device_models
        self.loaded = loaded
        self.needs = needs
        self.cut_dtype = cut_dtype
        self._prefix: nn.Module | None = None
        self.cut = cut_dtype.cut
        self.digest = loaded.digest
        self.frozen = loaded.frozen

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
        return self.device_models.batch_limit(self, maximum)

    def release(self) -> None:
        """Ends the lease; further calls do nothing."""
        self.device_models.release(self)
