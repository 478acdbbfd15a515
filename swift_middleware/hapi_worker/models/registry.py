"""Registry of models: from identities to digests to devices.

A model is found by the digest of bytes that this process hashed itself.  An
*identity* (account, container, object, ETag, length; sent by the filter after
it authorised the caller) leads to a digest only if its bytes came through
:meth:`Models.put` under that identity.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hapi_protocol.errors import DoesNotFitError, HapiError, UnavailableError
from hapi_protocol.job_messages import ModelIdentity
from hapi_splitter.cuts import FrozenGraph
from hapi_worker.models.device_models import DeviceModels, Lease
from hapi_worker.models.loaded_model import LoadedModel
from hapi_worker.models.memory_queue import QUEUED_LOAD_SECONDS, MemoryQueue
from hapi_worker.models.placement import DeviceState, devices_in_order
from hapi_worker.models.uploads import (
    Upload,
    Uploads,
    check_name,
    copy_of_error,
    too_busy_error,
)
from hapi_worker.peer import IsDisconnected, always_connected
from hapi_worker.wait_queue import WaitQueue, wait_until

MIN_BYTES_PER_SECOND = 10e6
"""A slower upload may lose the memory that was kept for it."""
TRY_SECONDS = 1.0
"""Interval of tries of a job that waits for memory."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnownModel:
    """A model whose identity is known, in memory or not.

    Attributes:
        digest: sha256 of its bytes.
        num_cuts: number of its cuts.
        needed_bytes: memory for the parameters and one sample of the last
            job.
    """

    digest: str
    num_cuts: int
    needed_bytes: int = 0


class Models:
    """The models of a worker, on all its devices.

    Args:
        devices: the models of each device; they share ``queue``.
        queue: models that wait for memory.
        max_identities: number of identities that are remembered.
        wait_seconds: longest wait of a job for another job's upload.
        max_waiting: number of jobs that may wait.
        load: makes a model from package bytes, and validates them.
        check_uploads: raises an error if no package can be validated now.
    """

    def __init__(
        self,
        devices: Sequence[DeviceModels],
        queue: MemoryQueue,
        *,
        max_identities: int,
        wait_seconds: float,
        max_waiting: int,
        load: Callable[[bytearray], FrozenGraph],
        check_uploads: Callable[[], None] = lambda: None,
    ) -> None:
        self.devices = tuple(devices)
        self._changed = queue.changed
        self._clock = queue.clock
        self._memory_queue = queue
        self._max_identities = max_identities
        self._wait_seconds = wait_seconds
        self._load = load
        self._known: OrderedDict[ModelIdentity, KnownModel] = OrderedDict()
        self._in_progress: set[str] = set()
        self._closed = False
        self.uploads = Uploads(
            self._changed, clock=self._clock, check_worker=check_uploads
        )
        self.waiting = WaitQueue(
            max_waiting,
            self._refusal,
            changed=self._changed,
            clock=self._clock,
        )

    def known(self, identity: ModelIdentity) -> KnownModel | None:
        """Returns the model that was uploaded under this identity, if it is
        remembered."""
        with self._changed:
            return self._known.get(identity)

    def loaded_totals(self) -> tuple[int, int]:
        """Number of models in memory, and bytes of their parameters."""
        counts = [each.loaded_totals() for each in self.devices]
        return sum(n for n, _ in counts), sum(size for _, size in counts)

    @property
    def limit_bytes(self) -> int:
        """Memory limit of all devices together."""
        return sum(each.limit_bytes for each in self.devices)

    def await_model(
        self,
        identity: ModelIdentity,
        is_disconnected: IsDisconnected = always_connected,
        memory_seconds: float = 0.0,
        account: str = "",
    ) -> str:
        """Returns the digest once the model is in memory.

        Args:
            identity: identity of the model, from the filter.
            is_disconnected: returns True if the caller waits no more.
            memory_seconds: longest wait for memory before the upload.
            account: the charged account.

        Raises:
            AnnotationError: ``bad_request``: the caller has disconnected.
            ConflictError: ``model_needed``: the caller must upload it.
            UnavailableError: no upload or no memory came in time, or too
                many jobs wait.
            HapiError: the refusal of the upload it waited for.
        """
        started = self._clock()
        upload: Upload | None = None
        digest: str | None = None

        def is_loaded() -> bool:
            nonlocal upload, digest
            if self._closed:
                raise too_busy_error(
                    "draining", "this worker is shutting down"
                )
            digest = self._find(identity)
            if digest is not None:
                return True
            if upload is not None and upload.error is not None:
                raise copy_of_error(upload.error)
            self.uploads.check(identity)
            waited = self._clock() - started
            if self._can_come(identity):
                upload = self.uploads.request(identity, account)
                if waited >= self._wait_seconds:
                    raise too_busy_error(
                        "worker_unavailable",
                        f"the upload of the model {identity.path} took longer "
                        f"than {self._wait_seconds:g} s",
                    )
            elif waited >= memory_seconds:
                raise too_busy_error(
                    "queue_full", "running jobs hold the memory"
                )
            return False

        with self._changed:
            self.waiting.wait(is_loaded, math.inf, account, is_disconnected)
            assert digest is not None, "loaded, or an error"
            # Its job may have to wait for admission as well.
            self._memory_queue.extend(
                identity, memory_seconds + QUEUED_LOAD_SECONDS
            )
            return digest

    def acquire(
        self,
        identity: ModelIdentity,
        cut: int,
        encoding: str = "float32",
        *,
        wait_seconds: float = 0.0,
        is_disconnected: IsDisconnected = always_connected,
        account: str = "",
    ) -> Lease:
        """Leases the model of ``identity`` for ``cut``.

        Args:
            identity: identity of the model, from the filter.
            cut: the cut at which features are taken.
            encoding: encoding of the features, which affects the memory.
            wait_seconds: longest wait for memory that running jobs hold.
            is_disconnected: returns True if the caller waits no more.
            account: the charged account.

        Raises:
            AnnotationError: ``bad_request``: the caller has disconnected.
            ConflictError: ``model_needed``: the caller must upload it.
            UnsupportedError: ``cut_out_of_range``, ``does_not_fit``; or the
                error of the upload it waited for.
            UnavailableError: no upload came in time, too many jobs wait, or
                running jobs hold the memory.
        """
        deadline = self._clock() + wait_seconds
        while True:
            left = max(deadline - self._clock(), 0.0)
            digest = self.await_model(identity, is_disconnected, left, account)
            before = self._generation()
            try:
                lease = self._lease(digest, cut, encoding)
            except DoesNotFitError:
                raise
            except UnavailableError:
                if not self._await_memory(
                    identity, before, deadline, is_disconnected
                ):
                    raise
                continue
            if lease is not None:
                self._record_lease(identity, lease)
                return lease

    def put(self, identity: ModelIdentity, package: bytearray) -> KnownModel:
        """Hashes, validates and loads a package, and remembers its identity.

        Raises:
            ConflictError: ``digest_mismatch`` with a digest in the name.
            PackageError: the bytes are not a valid package.
            DoesNotFitError: the model is too large for every device.
            UnavailableError: running jobs hold the memory.
        """
        digest = hashlib.sha256(package).hexdigest()
        check_name(identity, digest)
        with self._exclusive(digest):
            loaded = self._find_anywhere(digest)
            if loaded is None:
                started = self._clock()
                frozen = self._load(package)
                load_seconds = self._clock() - started
                size = frozen.parameter_bytes
                with self._changed:
                    # Folded layers change the size.
                    self._memory_queue.extend(
                        identity, self._wait_seconds, digest, size
                    )
                    self._remember(identity, digest, len(frozen.cuts), size)
                loaded = self._place(identity, digest, frozen, load_seconds)
                logger.info(
                    "model %s (%s): %d cuts, %d parameter bytes, loaded in "
                    "%.2f s",
                    digest[:12],
                    identity.path,
                    len(frozen.cuts),
                    frozen.parameter_bytes,
                    loaded.load_seconds,
                )
        with self._changed:
            return self._remember(
                identity,
                digest,
                len(loaded.frozen.cuts),
                loaded.parameter_bytes,
            )

    def check_length(self, identity: ModelIdentity) -> None:
        """Checks that a package of that length may fit on a device.

        Raises:
            DoesNotFitError: it can never fit.
        """
        largest = max(self.devices, key=lambda each: each.limit_bytes)
        what = f"the package {identity.path}"
        largest.check_length(what, identity.length_bytes)

    def begin_upload(self, identity: ModelIdentity) -> str:
        """Records that the package's bytes are about to arrive; returns the
        account for which it is uploaded."""
        with self._changed:
            account = self.uploads.begin(identity)
            length_seconds = identity.length_bytes / MIN_BYTES_PER_SECOND
            self._memory_queue.extend(
                identity, 2 * self._wait_seconds + length_seconds
            )
            return account

    def end_upload(
        self, identity: ModelIdentity, error: HapiError | None = None
    ) -> None:
        """Ends an upload, see :meth:`Uploads.end`; its memory stays queued for
        a while if it succeeded."""
        with self._changed:
            self.uploads.end(identity, error)
            if error is not None:
                self._memory_queue.end(identity, served=False)
            self._memory_queue.extend(identity, QUEUED_LOAD_SECONDS)

    def num_queued_loads(self) -> int:
        """Number of models that wait for memory."""
        with self._changed:
            return len(self._memory_queue.loads())

    def close(self) -> None:
        """Ends all waiting; no lease is given from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _generation(self) -> int:
        return sum(each.generation for each in self.devices)

    def _await_memory(
        self,
        identity: ModelIdentity,
        before: int,
        deadline: float,
        is_disconnected: IsDisconnected,
    ) -> bool:
        """Waits for memory; returns True if another try is worthwhile."""

        def is_worth_a_try() -> bool:
            self._memory_queue.request(*self._demand(identity))
            return self._closed or self._generation() != before

        with self._changed:
            left = deadline - self._clock()
            wait_until(
                self._changed,
                is_worth_a_try,
                min(left, TRY_SECONDS),
                is_disconnected=is_disconnected,
                clock=self._clock,
            )
            return not self._closed and self._clock() < deadline

    def _can_come(self, identity: ModelIdentity) -> bool:
        """Returns True if it is being uploaded, or there is memory for it."""
        return self.uploads.is_awaited(
            identity
        ) or self._memory_queue.can_load(*self._demand(identity))

    def _refusal(self, account: str) -> HapiError:
        return too_busy_error(
            "queue_full",
            f"account {account} has too many jobs waiting for models "
            f"({self.waiting.num_waiting()} in all; at most "
            f"{self.waiting.max_waiting} may wait)",
        )

    def _demand(
        self, identity: ModelIdentity
    ) -> tuple[ModelIdentity, str, int, list[DeviceModels]]:
        """The identity, its digest, the needed bytes and the devices, if
        known."""
        known = self._known.get(identity, KnownModel("", 0))
        needed = [each.sample_bytes(known.digest) for each in self.devices]
        needed += [identity.length_bytes, known.needed_bytes]
        devices = self._devices_for(known.digest)
        return identity, known.digest, max(needed), devices

    def _record_lease(self, identity: ModelIdentity, lease: Lease) -> None:
        """Records the memory that a lease needs, and ends its queueing."""
        with self._changed:
            known = self._known.get(identity)
            if known is not None:
                needed = lease.needs.peak_bytes(1)
                self._known[identity] = replace(known, needed_bytes=needed)
            self._memory_queue.end(identity, served=True)
            lease.device_models.freed()

    def _find(self, identity: ModelIdentity) -> str | None:
        """Returns the digest if the model is in memory; with the lock held."""
        known = self._known.get(identity)
        if known is None:
            return None
        self._known.move_to_end(identity)
        found = [each.find(known.digest) for each in self.devices]
        return known.digest if any(found) else None

    def _find_anywhere(self, digest: str) -> LoadedModel | None:
        with self._changed:
            found = (each.find(digest) for each in self.devices)
            return next((each for each in found if each is not None), None)

    def _source(self, digest: str) -> LoadedModel | None:
        """Returns a model to copy; a copy from a device that hangs would not
        end."""
        with self._changed:
            on_time = [each for each in self.devices if not each.has_late_pass]
            found = (each.find(digest) for each in on_time)
            return next((each for each in found if each is not None), None)

    def _devices_for(self, digest: str) -> list[DeviceModels]:
        with self._changed:
            places = [
                DeviceState(
                    each.in_service,
                    each.find(digest) is not None,
                    each.num_jobs(),
                    each.has_late_pass,
                )
                for each in self.devices
            ]
        return [self.devices[n] for n in devices_in_order(places)]

    def _lease(self, digest: str, cut: int, encoding: str) -> Lease | None:
        """Leases on the best device that has memory; None if the model was
        evicted."""
        refusal: HapiError | None = None
        for device_models in self._devices_for(digest):
            try:
                found = device_models.hold(digest, cut, encoding)
                if found is None and self._copy(digest, device_models):
                    found = device_models.hold(digest, cut, encoding)
            except (UnavailableError, DoesNotFitError) as error:
                refusal = _retryable(refusal, error)
                continue
            if found is not None:
                return found
        try:
            if refusal is not None:
                raise refusal
        finally:
            # Its traceback refers to this frame and to models.
            del refusal
        return None

    def _copy(self, digest: str, device_models: DeviceModels) -> bool:
        """Copies a model from another device; returns False without one."""
        with self._exclusive(digest):
            source = self._source(digest)
            if source is None:
                return False
            device_models.add(digest, source.frozen, source.load_seconds)
            return True

    def _remember(
        self,
        identity: ModelIdentity,
        digest: str,
        num_cuts: int,
        needed_bytes: int,
    ) -> KnownModel:
        """Remembers a model under an identity; called with the lock held."""
        known = self._known.get(identity)
        if known is None or known.digest != digest:
            known = KnownModel(digest, num_cuts, needed_bytes)
        self._known[identity] = known
        self._known.move_to_end(identity)
        while len(self._known) > self._max_identities:
            self._known.popitem(last=False)
        return known

    def _place(
        self,
        identity: ModelIdentity,
        digest: str,
        frozen: FrozenGraph,
        load_seconds: float,
    ) -> LoadedModel:
        refusal: HapiError | None = None
        with self._changed:
            queued = self._memory_queue.loads().get(identity)
        devices = self._devices_for(digest)
        if queued is not None:
            # The device with memory for it comes first.
            devices.sort(key=lambda each: each is not queued.device)
        for device_models in devices:
            try:
                return device_models.add(digest, frozen, load_seconds)
            except (UnavailableError, DoesNotFitError) as error:
                refusal = _retryable(refusal, error)
        raise refusal or too_busy_error(
            "queue_full", "no device is in service"
        )

    @contextlib.contextmanager
    def _exclusive(self, digest: str) -> Iterator[None]:
        """Lets one thread at a time load or copy a model."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: digest not in self._in_progress, self._wait_seconds
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
            with self._changed:
                self._in_progress.discard(digest)
                self._changed.notify_all()


def _retryable(before: HapiError | None, error: HapiError) -> HapiError:
    """Returns the one of two devices' refusals that a retry may cure."""
    return before if isinstance(before, UnavailableError) else error
