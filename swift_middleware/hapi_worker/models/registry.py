"""Registry of models: from identities to digests to devices.

A model is found by the digest of bytes that this process hashed itself.  An
*identity* (account, container, object, ETag, length; sent by the filter after
it authorised the caller) leads to a digest only if its bytes came through
:meth:`Models.put` under that identity.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from hapi_protocol.errors import DoesNotFitError, HapiError, UnavailableError
from hapi_protocol.job_messages import ModelIdentity
from hapi_splitter.cuts import FrozenGraph
from hapi_worker.models.device_models import DeviceModels, Lease
from hapi_worker.models.loaded_model import touch
from hapi_worker.models.memory_queue import QUEUED_LOAD_SECONDS, MemoryQueue
from hapi_worker.models.model_copies import ModelCopies
from hapi_worker.models.uploads import (
    Upload,
    Uploads,
    check_name,
    copy_of_error,
    too_busy_error,
)
from hapi_worker.peer import POLL_SECONDS, IsDisconnected, always_connected
from hapi_worker.wait_queue import QueueLimits, WaitQueue

MIN_BYTES_PER_SECOND = 10e6
"""A slower upload may lose the memory that was kept for it."""
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


@dataclass(eq=False)
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

    devices: Sequence[DeviceModels]
    queue: MemoryQueue
    _: KW_ONLY
    max_identities: int
    wait_seconds: float
    max_waiting: int
    load: Callable[[bytearray], FrozenGraph]
    check_uploads: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._changed = self.queue.changed
        self._clock = self.queue.clock
        self.copies = ModelCopies(
            self.devices, self._changed, self.wait_seconds
        )
        self._known: OrderedDict[ModelIdentity, KnownModel] = OrderedDict()
        self._closed = False
        self.uploads = Uploads(
            self._changed, clock=self._clock, check_worker=self.check_uploads
        )
        self.waiting = WaitQueue(
            QueueLimits(waiting=self.max_waiting),
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
        counts = [device.loaded_totals() for device in self.devices]
        return sum(n for n, _ in counts), sum(size for _, size in counts)

    @property
    def limit_bytes(self) -> int:
        """Memory limit of all devices together."""
        return sum(device.limit_bytes for device in self.devices)

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

        def is_loaded(waiter: object) -> bool:
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
                if waited >= self.wait_seconds:
                    raise too_busy_error(
                        "worker_unavailable",
                        f"the upload of the model {identity.path} took longer "
                        f"than {self.wait_seconds:g} s",
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
            self.queue.extend(identity, memory_seconds + QUEUED_LOAD_SECONDS)
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
            before = self.queue.generation
            try:
                lease = self.copies.lease(digest, cut, encoding)
            except DoesNotFitError:
                raise
            except UnavailableError:
                if not self._await_memory(identity, before, deadline):
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
        with self.copies.exclusive(digest):
            loaded = self.copies.find(digest)
            if loaded is None:
                started = self._clock()
                frozen = self.load(package)
                load_seconds = self._clock() - started
                with self._changed:
                    # Folded layers change the size.
                    self.queue.extend(
                        identity,
                        self.wait_seconds,
                        digest,
                        frozen.parameter_bytes,
                    )
                    self._remember(identity, digest, frozen)
                    load = self.queue.loads().get(identity)
                preferred = load.device if load else None
                loaded = self.copies.place(
                    digest, frozen, load_seconds, preferred
                )
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
            return self._remember(identity, digest, loaded.frozen)

    def check_length(self, identity: ModelIdentity) -> None:
        """Checks that a package of that length may fit on a device.

        Raises:
            DoesNotFitError: it can never fit.
        """
        largest = max(self.devices, key=lambda device: device.limit_bytes)
        what = f"the package {identity.path}"
        largest.check_size(what, identity.length_bytes)

    def begin_upload(self, identity: ModelIdentity) -> str:
        """Records that the package's bytes are about to arrive; returns the
        account for which it is uploaded."""
        with self._changed:
            account = self.uploads.begin(identity)
            length_seconds = identity.length_bytes / MIN_BYTES_PER_SECOND
            self.queue.extend(identity, 2 * self.wait_seconds + length_seconds)
            return account

    def end_upload(
        self, identity: ModelIdentity, error: HapiError | None = None
    ) -> None:
        """Ends an upload, see :meth:`Uploads.end`; its memory stays queued for
        a while if it succeeded."""
        with self._changed:
            self.uploads.end(identity, error)
            if error is not None:
                self.queue.end(identity, served=False)
            self.queue.extend(identity, QUEUED_LOAD_SECONDS)

    def num_queued_loads(self) -> int:
        """Number of models that wait for memory."""
        with self._changed:
            return len(self.queue.loads())

    def close(self) -> None:
        """Ends all waiting; no lease is given from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _await_memory(
        self, identity: ModelIdentity, before: int, deadline: float
    ) -> bool:
        """Waits for memory, shortly; returns False after the deadline.

        Args:
            identity: identity of the model, which is queued.
            before: the queue's generation before the last try.
            deadline: on the clock.
        """
        left = deadline - self._clock()
        queue = self.queue
        with self._changed:
            queue.request(*self._demand(identity))
            if left > 0:
                self._changed.wait_for(
                    lambda: self._closed or queue.generation != before,
                    min(left, POLL_SECONDS),
                )
        return left > 0

    def _can_come(self, identity: ModelIdentity) -> bool:
        """Returns True if it is being uploaded, or there is memory for it."""
        return self.uploads.is_awaited(identity) or self.queue.can_load(
            *self._demand(identity)
        )

    def _refusal(self, account: str) -> HapiError:
        return too_busy_error(
            "queue_full",
            f"account {account} has too many jobs waiting for models "
            f"({self.waiting.num_waiting()} in all; at most "
            f"{self.waiting.limits.waiting} may wait)",
        )

    def _demand(
        self, identity: ModelIdentity
    ) -> tuple[ModelIdentity, str, int, list[DeviceModels]]:
        """The identity, its digest, the needed bytes and the devices, if
        known."""
        known = self._known.get(identity, KnownModel("", 0))
        needed = [device.sample_bytes(known.digest) for device in self.devices]
        needed += [identity.length_bytes, known.needed_bytes]
        devices = self.copies.devices_for(known.digest)
        return identity, known.digest, max(needed), devices

    def _record_lease(self, identity: ModelIdentity, lease: Lease) -> None:
        """Records the memory that a lease needs, and ends its queueing."""
        with self._changed:
            known = self._known.get(identity)
            if known is not None:
                needed = lease.needs.peak_bytes(1)
                self._known[identity] = replace(known, needed_bytes=needed)
            self.queue.end(identity, served=True)

    def _find(self, identity: ModelIdentity) -> str | None:
        """Returns the digest if the model is in memory; with the lock held."""
        known = self._known.get(identity)
        if known is None:
            return None
        self._known.move_to_end(identity)
        loaded = self.copies.find(known.digest)
        return known.digest if loaded else None

    def _remember(
        self, identity: ModelIdentity, digest: str, frozen: FrozenGraph
    ) -> KnownModel:
        """Remembers a model under an identity; called with the lock held."""
        known = self._known.get(identity)
        if known is None or known.digest != digest:
            num_bytes = frozen.parameter_bytes
            known = KnownModel(digest, len(frozen.cuts), num_bytes)
        self._known[identity] = known
        touch(self._known, identity, self.max_identities)
        return known
