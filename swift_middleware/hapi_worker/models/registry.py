"""Which objects are known to be which models, and on which device they are.

A model is found by the digest of bytes that this process hashed itself.  An
*identity* (account, container, object, ETag, length; shown by the filter
after the caller's own authorisation) leads to a digest only if its bytes came
through :meth:`Models.put` under that identity.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hapi_protocol.errors import DoesNotFitError, HapiError, UnavailableError
from hapi_protocol.job_messages import ModelIdentity
from hapi_splitter.cuts import FrozenGraph
from hapi_worker.models.device_models import Lease, Residency
from hapi_worker.models.loaded_model import Resident
from hapi_worker.models.memory_queue import SEEN_SECONDS, MemoryQueue
from hapi_worker.models.placement import Place, places_in_order
from hapi_worker.models.uploads import Uploads, busy, check_name
from hapi_worker.peer import POLL_SECONDS, IsGone, asker_gone, never_gone

MIN_BYTES_PER_SECOND = 10e6
"""An upload that is slower may lose the room that was kept for it."""
TRY_SECONDS = 1.0
"""After which one who waits for memory tries again in any case."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnownModel:
    """What is remembered of an identity, in memory or not.

    Attributes:
        digest: sha256 of its bytes.
        num_cuts: that it has.
        needed_bytes: for one sample of the last job, parameters included.
    """

    digest: str
    num_cuts: int
    needed_bytes: int = 0


class Models:
    """The models of a worker, on all its devices.

    Args:
        residencies: of the devices; they share ``changed``.
        changed: guards all of them.
        max_identities: how many identities are remembered.
        wait_seconds: how long one waits for another's upload.
        max_waiting: how many may wait so.
        load: package bytes → model; the validating loader.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        residencies: Sequence[Residency],
        changed: threading.Condition,
        *,
        max_identities: int,
        wait_seconds: float,
        max_waiting: int,
        load: Callable[[bytearray], FrozenGraph],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.residencies = tuple(residencies)
        self._changed = changed
        self._max_identities = max_identities
        self._wait_seconds = wait_seconds
        self._load = load
        self._clock = clock
        self._known: OrderedDict[ModelIdentity, KnownModel] = OrderedDict()
        self._busy: set[str] = set()
        self._room = MemoryQueue(self._order, clock)
        self._closed = False
        self.uploads = Uploads(
            changed,
            wait_seconds=wait_seconds,
            max_waiting=max_waiting,
            clock=clock,
        )

    def known(self, identity: ModelIdentity) -> KnownModel | None:
        """What bytes uploaded under this identity were, if remembered."""
        with self._changed:
            return self._known.get(identity)

    def resident(self) -> tuple[int, int]:
        """Models in memory, and bytes of their parameters."""
        counts = [each.resident() for each in self.residencies]
        return sum(n for n, _ in counts), sum(size for _, size in counts)

    @property
    def limit_bytes(self) -> int:
        """Of all devices."""
        return sum(each.limit_bytes for each in self.residencies)

    def await_model(
        self,
        identity: ModelIdentity,
        is_gone: IsGone = never_gone,
        room_seconds: float = 0.0,
        account: str = "",
    ) -> str:
        """Returns the digest when the model is in memory.

        Args:
            identity: shown by the filter.
            is_gone: whether who asks waits no more.
            room_seconds: how long one waits for room, before the upload.
            account: that is charged.

        Raises:
            AnnotationError: ``bad_request``: who asks has gone.
            ConflictError: ``model_needed``: the caller is the one to upload.
            UnavailableError: no upload came in time, or no room, or too many
                wait.
            HapiError: of the upload it waited for.
        """
        began = self._clock()
        with self._changed:
            while True:
                if self._closed:
                    raise busy("draining", "this worker is shutting down")
                digest = self._find(identity)
                if digest is not None:
                    # Its job may have to wait for a place as well.
                    self._room.see_to(identity, room_seconds + SEEN_SECONDS)
                    return digest
                if is_gone():
                    raise asker_gone()
                self.uploads.check(identity)
                if self._may_come(identity):
                    until = began + self._wait_seconds
                    self.uploads.wait(identity, until, account)
                elif self._clock() < began + room_seconds:
                    self.uploads.pause(POLL_SECONDS, account)
                else:
                    raise busy("queue_full", "running jobs hold the memory")

    def acquire(
        self,
        identity: ModelIdentity,
        cut: int,
        encoding: str = "float32",
        *,
        wait_seconds: float = 0.0,
        is_gone: IsGone = never_gone,
        account: str = "",
    ) -> Lease:
        """A hold on the model of ``identity``, for ``cut``.

        Args:
            identity: shown by the filter.
            cut: where features are taken.
            encoding: of the features, for the memory that it needs.
            wait_seconds: for memory that running jobs hold.
            is_gone: whether who asks waits no more.
            account: that is charged.

        Raises:
            AnnotationError: ``bad_request``: who asks has gone.
            ConflictError: ``model_needed``: the caller is the one to upload.
            UnsupportedError: ``cut_out_of_range``, ``does_not_fit``; or the
                error of the upload it waited for.
            UnavailableError: no upload came in time, too many wait for
                one, or running jobs hold the memory.
        """
        deadline = self._clock() + wait_seconds
        while True:
            left = max(deadline - self._clock(), 0.0)
            digest = self.await_model(identity, is_gone, left, account)
            before = self._generation()
            try:
                lease = self._hold(digest, cut, encoding)
            except DoesNotFitError:
                raise
            except UnavailableError:
                if not self._await_memory(identity, before, deadline, is_gone):
                    raise
                continue
            if lease is not None:
                self._held(identity, lease)
                return lease

    def put(self, identity: ModelIdentity, package: bytearray) -> KnownModel:
        """Hashes, validates and loads a package, and remembers its identity.

        Raises:
            ConflictError: ``digest_mismatch`` with a digest in the name.
            PackageError: not a package, or a hostile one.
            DoesNotFitError: more than any device may hold.
            UnavailableError: running jobs hold the memory.
        """
        digest = hashlib.sha256(package).hexdigest()
        check_name(identity, digest)
        with self._changed:
            self._room.see_to(identity, self._wait_seconds, digest)
        with self._claimed(digest):
            resident = self._resident_anywhere(digest)
            if resident is None:
                started = self._clock()
                frozen = self._load(package)
                load_seconds = self._clock() - started
                size = frozen.parameter_bytes
                with self._changed:
                    # Other than the package's: layers are folded.
                    self._room.grow(identity, size)
                    self._remember(identity, digest, len(frozen.cuts), size)
                resident = self._place(identity, digest, frozen, load_seconds)
                logger.info(
                    "model %s (%s): %d cuts, %d parameter bytes, loaded in "
                    "%.2f s",
                    digest[:12],
                    identity.path,
                    len(frozen.cuts),
                    frozen.parameter_bytes,
                    resident.load_seconds,
                )
        with self._changed:
            return self._remember(
                identity,
                digest,
                len(resident.frozen.cuts),
                resident.parameter_bytes,
            )

    def check_length(self, identity: ModelIdentity) -> None:
        """
        Raises:
            DoesNotFitError: a package of that length can never be held.
        """
        largest = max(self.residencies, key=lambda each: each.limit_bytes)
        what = f"the package {identity.path}"
        largest.check_length(what, identity.length_bytes)

    def begin_upload(self, identity: ModelIdentity) -> None:
        """The package's bytes are about to arrive."""
        with self._changed:
            self.uploads.begin(identity)
            length_seconds = identity.length_bytes / MIN_BYTES_PER_SECOND
            self._room.see_to(identity, self._wait_seconds + length_seconds)

    def end_upload(
        self, identity: ModelIdentity, error: HapiError | None = None
    ) -> None:
        """As :meth:`Uploads.end`; who claimed room for it takes it soon."""
        with self._changed:
            self.uploads.end(identity, error)
            if error is not None:
                self._room.drop(identity)
            self._room.see_to(identity, SEEN_SECONDS)

    def num_claims(self) -> int:
        """Models that wait for memory."""
        with self._changed:
            return sum(len(each.claims) for each in self.residencies)

    def close(self) -> None:
        """Ends all waiting; nothing is handed out any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _generation(self) -> int:
        return sum(each.generation for each in self.residencies)

    def _await_memory(
        self,
        identity: ModelIdentity,
        before: int,
        deadline: float,
        is_gone: IsGone,
    ) -> bool:
        """Whether it is worth another try, in time."""
        with self._changed:
            self._room.claim(*self._wanted(identity))
            until = min(deadline, self._clock() + TRY_SECONDS)
            while (left := until - self._clock()) > 0:
                if self._closed:
                    return False
                if self._generation() != before:
                    return True
                if is_gone():
                    raise asker_gone()
                self._room.claim(*self._wanted(identity))
                self._changed.wait(min(left, POLL_SECONDS))
            return self._clock() < deadline

    def _may_come(self, identity: ModelIdentity) -> bool:
        """Whether it is on its way, or there is room for it."""
        return self.uploads.is_awaited(identity) or self._room.is_there(
            *self._wanted(identity)
        )

    def _wanted(
        self, identity: ModelIdentity
    ) -> tuple[ModelIdentity, str, int]:
        """With the digest, and the bytes that it needs, as far as known."""
        known = self._known.get(identity, KnownModel("", 0))
        needed = [each.sample_bytes(known.digest) for each in self.residencies]
        needed += [identity.length_bytes, known.needed_bytes]
        return identity, known.digest, max(needed)

    def _held(self, identity: ModelIdentity, lease: Lease) -> None:
        """It is in memory: what it needs is known, and claimed no more."""
        with self._changed:
            known = self._known.get(identity)
            if known is not None:
                needed = lease.needs.peak_bytes(1)
                self._known[identity] = replace(known, needed_bytes=needed)
            self._room.met(identity)

    def _find(self, identity: ModelIdentity) -> str | None:
        """Called with the lock held."""
        known = self._known.get(identity)
        if known is None:
            return None
        self._known.move_to_end(identity)
        found = [each.find(known.digest) for each in self.residencies]
        return known.digest if any(found) else None

    def _resident_anywhere(self, digest: str) -> Resident | None:
        with self._changed:
            found = (each.find(digest) for each in self.residencies)
            return next((each for each in found if each is not None), None)

    def _source(self, digest: str) -> Resident | None:
        """To copy: what is on a device that hangs would not come."""
        with self._changed:
            on_time = [each for each in self.residencies if not each.is_late]
            found = (each.find(digest) for each in on_time)
            return next((each for each in found if each is not None), None)

    def _order(self, digest: str) -> list[Residency]:
        with self._changed:
            places = [
                Place(
                    each.in_service,
                    each.find(digest) is not None,
                    each.num_jobs(),
                    each.is_late,
                )
                for each in self.residencies
            ]
        return [self.residencies[n] for n in places_in_order(places)]

    def _hold(self, digest: str, cut: int, encoding: str) -> Lease | None:
        """On the best device that has room; None if the model has left."""
        refusal: HapiError | None = None
        for residency in self._order(digest):
            try:
                found = residency.hold(digest, cut, encoding)
                if found is None and self._copy(digest, residency):
                    found = residency.hold(digest, cut, encoding)
            except (UnavailableError, DoesNotFitError) as error:
                refusal = _lighter(refusal, error)
                continue
            if found is not None:
                return found
        try:
            if refusal is not None:
                raise refusal
        finally:
            # Its traceback holds this frame, and models in those it passed.
            del refusal
        return None

    def _copy(self, digest: str, residency: Residency) -> bool:
        """Brings a model from another device; whether it is there then."""
        with self._claimed(digest):
            source = self._source(digest)
            if source is None:
                return False
            residency.add(digest, source.frozen, source.load_seconds)
            return True

    def _remember(
        self,
        identity: ModelIdentity,
        digest: str,
        num_cuts: int,
        needed_bytes: int,
    ) -> KnownModel:
        """Called with the lock held."""
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
    ) -> Resident:
        refusal: HapiError | None = None
        with self._changed:
            kept = self._room.device_of(identity)
        # Where room was kept comes first; the rest stays in order.
        for residency in sorted(
            self._order(digest), key=lambda each: each is not kept
        ):
            try:
                return residency.add(digest, frozen, load_seconds)
            except (UnavailableError, DoesNotFitError) as error:
                refusal = _lighter(refusal, error)
        raise refusal or busy("queue_full", "no device is in service")

    @contextlib.contextmanager
    def _claimed(self, digest: str) -> Iterator[None]:
        """One thread at a time loads or copies a model."""
        deadline = self._clock() + self._wait_seconds
        with self._changed:
            while digest in self._busy:
                left = deadline - self._clock()
                if left <= 0:
                    raise busy(
                        "worker_unavailable",
                        "the same package is still being loaded for another "
                        "request",
                    )
                self._changed.wait(left)
            self._busy.add(digest)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(digest)
                self._changed.notify_all()


def _lighter(before: HapiError | None, error: HapiError) -> HapiError:
    """Of two devices' refusals the one that may pass."""
    return before if isinstance(before, UnavailableError) else error
