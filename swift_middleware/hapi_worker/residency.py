"""Which models are in memory, and which objects they are known to be.

A model is found by the digest of bytes that this process hashed itself.  An
*identity* (account, container, object, ETag, length; shown by the filter
after the caller's own authorisation) leads to a digest only if its bytes came
through :meth:`Residency.put` under that identity.

All cuts of a model share its parameters.  Models that a job holds stay;
others leave, least recently used first, when room is needed.  One forward
pass runs at a time, so the device holds the parameters of all resident models
and the working memory of one pass.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hapi_protocol.encodings import Encoding
from hapi_protocol.errors import DoesNotFitError, UnsupportedError
from hapi_protocol.messages import ModelIdentity
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.memory import Needs, needs_of
from hapi_worker.uploads import Uploads, busy, check_name

MAX_PREFIXES = 4
MAX_NEEDS = 64
"""What a model keeps of its last used cuts: modules and memory needs."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnownModel:
    """What is remembered of an identity, in memory or not."""

    digest: str
    num_cuts: int


@dataclass
class Resident:
    """A model in memory.

    Attributes:
        load_seconds: to check the package, load it and move it to the device.
        leases: jobs that hold it.
        working_bytes: of one sample at the costliest cut they hold it for.
        prefixes: the last used, by cut; for the device's thread only.
        needs: the last used, by cut and dtype of the features; guarded by
            the residency's lock.
    """

    digest: str
    frozen: FrozenGraph
    parameter_bytes: int
    load_seconds: float = 0.0
    leases: int = 0
    working_bytes: int = 0
    prefixes: OrderedDict[int, nn.Module] = field(default_factory=OrderedDict)
    needs: OrderedDict[tuple[int, str], Needs] = field(
        default_factory=OrderedDict
    )

    def prefix(self, cut: int) -> nn.Module:
        if cut not in self.prefixes:
            self.prefixes[cut] = self.frozen.prefix(cut)
        _keep_last(self.prefixes, cut, MAX_PREFIXES)
        return self.prefixes[cut]


class Lease:
    """A job's hold on a model: until released it stays in memory.

    Attributes:
        cut: the job's.
        digest: sha256 of the package.
        frozen: the model, on the device.
    """

    def __init__(
        self,
        residency: Residency,
        resident: Resident,
        cut: int,
        needs: Needs,
    ) -> None:
        self._residency = residency
        self._resident = resident
        self._needs = needs
        self._prefix: nn.Module | None = None
        self._released = False
        self.cut = cut
        self.digest = resident.digest
        self.frozen = resident.frozen

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample's features at the cut."""
        return tuple(self.frozen.cuts[self.cut - 1].shape)

    def prefix(self) -> nn.Module:
        """``[B, *input_shape]`` float32 → ``[B, *shape]``; call it on the
        device's thread only."""
        if self._prefix is None:
            self._prefix = self._resident.prefix(self.cut)
        return self._prefix

    def batch_limit(self, maximum: int) -> int:
        """Most samples a forward pass has memory for now, at least 1."""
        batch = self._needs.batch_for(self.available_bytes(), maximum)
        return max(batch, 1)

    @property
    def load_seconds(self) -> float:
        """That the model took to load."""
        return self._resident.load_seconds

    def available_bytes(self) -> int:
        """For the parameters and one forward pass of the model, now."""
        return self._residency.available_to(self._resident)

    def release(self) -> None:
        """Gives the model free; further calls do nothing."""
        if not self._released:
            self._released = True
            self._residency.released(self._resident)


class Residency:
    """The models of one device.

    Args:
        device: where their parameters live.
        limit_bytes: for all parameters and one forward pass.
        max_identities: how many identities are remembered.
        wait_seconds: how long :meth:`acquire` waits for another's upload.
        max_waiting: how many may wait so.
        load: package bytes → model; the validating loader.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        device: torch.device,
        limit_bytes: int,
        *,
        max_identities: int,
        wait_seconds: float,
        max_waiting: int,
        load: Callable[[bytearray], FrozenGraph],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self._max_identities = max_identities
        self._wait_seconds = wait_seconds
        self._load = load
        self._clock = clock
        self._changed = threading.Condition()
        self._known: OrderedDict[ModelIdentity, KnownModel] = OrderedDict()
        self._residents: OrderedDict[str, Resident] = OrderedDict()
        self._loading: dict[str, int] = {}
        self._closed = False
        self.uploads = Uploads(
            self._changed,
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
        with self._changed:
            return len(self._residents), self._used_bytes()

    def acquire(
        self, identity: ModelIdentity, cut: int, encoding: str = "float32"
    ) -> Lease:
        """A hold on the model of ``identity``, for ``cut``.

        Args:
            identity: shown by the filter.
            cut: where features are taken.
            encoding: of the features, for the memory that it needs.

        Raises:
            ConflictError: ``model_needed``: the caller is the one to upload.
            UnsupportedError: ``cut_out_of_range``, ``does_not_fit``; or the
                error of the upload it waited for.
            UnavailableError: no upload came in time, too many wait for
                one, or running jobs hold the memory.
        """
        deadline = self._clock() + self._wait_seconds
        computed: tuple[Resident, Needs] | None = None
        key = cut, Encoding.parse(encoding).dtype
        while True:
            with self._changed:
                resident = self._wait_for(identity, deadline)
                _check_cut(resident, cut)
                if computed is not None and computed[0] is resident:
                    resident.needs[key] = computed[1]
                if key in resident.needs:
                    _keep_last(resident.needs, key, MAX_NEEDS)
                    return self._lease(resident, cut, resident.needs[key])
            # A walk over the whole model: nobody else waits for it.
            computed = resident, needs_of(resident.frozen, *key)

    def put(self, identity: ModelIdentity, package: bytearray) -> KnownModel:
        """Hashes, validates and loads a package, and remembers its identity.

        Raises:
            ConflictError: ``digest_mismatch`` with a digest in the name.
            PackageError: not a package, or a hostile one.
            DoesNotFitError: more than ``limit_bytes``.
            UnavailableError: running jobs hold the memory.
        """
        digest = hashlib.sha256(package).hexdigest()
        check_name(identity, digest)
        self._claim_loading(digest)
        try:
            resident = self._residents.get(digest)
            if resident is None:
                resident = self._load_resident(identity, digest, package)
        finally:
            with self._changed:
                del self._loading[digest]
                self._changed.notify_all()
        known = KnownModel(digest, len(resident.frozen.cuts))
        with self._changed:
            self._known[identity] = known
            self._known.move_to_end(identity)
            while len(self._known) > self._max_identities:
                self._known.popitem(last=False)
        return known

    def check_length(self, identity: ModelIdentity) -> None:
        """
        Raises:
            DoesNotFitError: a package of that length can never be held.
        """
        if identity.length_bytes > self.limit_bytes:
            raise _too_big(
                f"the package {identity.path}",
                identity.length_bytes,
                self.limit_bytes,
            )

    def available_to(self, resident: Resident) -> int:
        """Bytes for the parameters and one forward pass of a model, now."""
        with self._changed:
            others = self._used_bytes() - resident.parameter_bytes
        return self.limit_bytes - others

    def released(self, resident: Resident) -> None:
        """Called by :meth:`Lease.release`."""
        with self._changed:
            resident.leases -= 1
            if not resident.leases:
                resident.working_bytes = 0
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all waiting; nothing is handed out any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait_for(self, identity: ModelIdentity, deadline: float) -> Resident:
        while True:
            if self._closed:
                raise busy("draining", "this worker is shutting down")
            resident = self._find(identity)
            if resident is not None:
                return resident
            self.uploads.wait(identity, deadline)

    def _find(self, identity: ModelIdentity) -> Resident | None:
        known = self._known.get(identity)
        if known is None:
            return None
        self._known.move_to_end(identity)
        resident = self._residents.get(known.digest)
        if resident is not None:
            self._residents.move_to_end(known.digest)
        return resident

    def _lease(self, resident: Resident, cut: int, needs: Needs) -> Lease:
        needed = needs.peak_bytes(1)
        if needed > self.limit_bytes:
            raise _too_big(
                f"one sample up to cut {cut} of the model "
                f"{resident.digest[:12]}",
                needed,
                self.limit_bytes,
            )
        working = needed - resident.parameter_bytes
        self._make_room(0, working, keep=resident)
        resident.leases += 1
        resident.working_bytes = max(resident.working_bytes, working)
        return Lease(self, resident, cut, needs)

    def _claim_loading(self, digest: str) -> None:
        deadline = self._clock() + self._wait_seconds
        with self._changed:
            while digest in self._loading:
                left = deadline - self._clock()
                if left <= 0:
                    raise busy(
                        "worker_unavailable",
                        "the same package is still being loaded for another "
                        "request",
                    )
                self._changed.wait(left)
            self._loading[digest] = 0

    def _load_resident(
        self, identity: ModelIdentity, digest: str, package: bytearray
    ) -> Resident:
        started = self._clock()
        frozen = self._load(package)
        size = frozen.parameter_bytes
        if size > self.limit_bytes:
            raise _too_big(
                f"the model {identity.path}", size, self.limit_bytes
            )
        with self._changed:
            # Room is taken before the copy to the device, not after.
            self._make_room(size, 0)
            self._loading[digest] = size
        try:
            resident = Resident(digest, frozen.to(self.device), size)
        except torch.OutOfMemoryError as error:
            raise busy(
                "queue_full", f"the device has no memory left: {error}"
            ) from error
        resident.load_seconds = self._clock() - started
        with self._changed:
            self._loading[digest] = 0
            self._residents[digest] = resident
        logger.info(
            "model %s (%s): %d cuts, %d parameter bytes, loaded in %.2f s",
            digest[:12],
            identity.path,
            len(frozen.cuts),
            size,
            resident.load_seconds,
        )
        return resident

    def _used_bytes(self) -> int:
        resident = sum(r.parameter_bytes for r in self._residents.values())
        return resident + sum(self._loading.values())

    def _make_room(
        self,
        parameter_bytes: int,
        working_bytes: int,
        keep: Resident | None = None,
    ) -> None:
        """Evicts idle models until both fit beside what jobs hold."""
        working = [r.working_bytes for r in self._residents.values()]
        needed = parameter_bytes + max(working_bytes, *working, 0)
        idle = [
            r
            for r in self._residents.values()
            if r.leases == 0 and r is not keep
        ]
        while idle and self.limit_bytes - self._used_bytes() < needed:
            self._evict(idle.pop(0))
        available = self.limit_bytes - self._used_bytes()
        if available < needed:
            raise busy(
                "queue_full",
                f"running jobs hold the memory: {needed} bytes are needed, "
                f"{available} available",
                needed_bytes=needed,
                available_bytes=available,
            )

    def _evict(self, resident: Resident) -> None:
        logger.info("model %s leaves memory", resident.digest[:12])
        del self._residents[resident.digest]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _check_cut(resident: Resident, cut: int) -> None:
    last = len(resident.frozen.cuts)
    if not 1 <= cut <= last:
        raise UnsupportedError(
            "cut_out_of_range",
            f"cut {cut}: {resident.digest[:12]} has cuts 1 to {last}",
            details={"cut": cut, "allowed": [1, last]},
        )


def _keep_last(kept: OrderedDict[Any, Any], key: object, count: int) -> None:
    kept.move_to_end(key)
    while len(kept) > count:
        kept.popitem(last=False)


def _too_big(what: str, needed: int, available: int) -> DoesNotFitError:
    return DoesNotFitError(
        "does_not_fit",
        f"{what} needs {needed} bytes of the device's memory, and "
        f"{available} are available",
        details={"needed_bytes": needed, "available_bytes": available},
    )
