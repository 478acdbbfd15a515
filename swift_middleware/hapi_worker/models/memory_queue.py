"""Who waits for room for which model, on which device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hapi_protocol.job_messages import ModelIdentity
from hapi_worker.models.device_models import Residency
from hapi_worker.models.load_queue import QueuedLoad
from hapi_worker.models.uploads import GRACE_SECONDS, RETRY_SECONDS

SEEN_SECONDS = 2 * RETRY_SECONDS
"""How long a claim holds after the last time that somebody saw to it: who was
told to come again has it still."""


class MemoryQueue:
    """Claims of models, by identity; all is called with the lock held.

    Args:
        devices: those in service, the best for a digest first.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        devices: Callable[[str], Sequence[Residency]],
        clock: Callable[[], float],
    ) -> None:
        self._devices = devices
        self._clock = clock
        self._claims: dict[ModelIdentity, tuple[Residency, QueuedLoad]] = {}

    def is_there(
        self, identity: ModelIdentity, digest: str, needed_bytes: int
    ) -> bool:
        """Whether the model can come; if not, it waits for its turn.

        Args:
            identity: of the model.
            digest: of its package, or empty.
            needed_bytes: for parameters and one sample.
        """
        if not any(
            needed_bytes <= each.limit_bytes for each in self._devices(digest)
        ):
            # It can never, or no device is left; it will be told so.
            return True
        self.claim(identity, digest, needed_bytes)
        if identity not in self._claims:
            return False
        if not self._found_place(identity, digest):
            return False
        self.see_to(identity, GRACE_SECONDS)
        return True

    def device_of(self, identity: ModelIdentity) -> Residency | None:
        """Where it will have room, if it waits."""
        claimed = self._claims.get(identity)
        return claimed and claimed[0]

    def claim(
        self, identity: ModelIdentity, digest: str, needed_bytes: int
    ) -> None:
        """Somebody waits for it now; as :meth:`is_there`."""
        self.see_to(identity, SEEN_SECONDS, digest)
        if identity in self._claims:
            self.grow(identity, needed_bytes)
            return
        for residency in self._devices(digest):
            if needed_bytes <= residency.limit_bytes:
                now = self._clock()
                claim = QueuedLoad(
                    identity.account,
                    needed_bytes,
                    now,
                    now + SEEN_SECONDS,
                    digest,
                )
                if residency.claims.add(claim):
                    self._claims[identity] = residency, claim
                return

    def grow(self, identity: ModelIdentity, needed_bytes: int) -> None:
        """Its claim, if it has one, is found to need more."""
        if identity in self._claims:
            residency, claim = self._claims[identity]
            needed_bytes = max(needed_bytes, claim.num_bytes)
            claim.num_bytes = min(needed_bytes, residency.limit_bytes)

    def see_to(
        self, identity: ModelIdentity, seconds: float, digest: str = ""
    ) -> None:
        """Its claim, if it has one, holds for so long from now on.

        Args:
            identity: of the model.
            seconds: from now on.
            digest: of its package, where that is known now.
        """
        self._forget_lapsed()
        if identity in self._claims:
            _, claim = self._claims[identity]
            claim.until = self._clock() + seconds
            claim.digest = digest or claim.digest

    def met(self, identity: ModelIdentity) -> None:
        """It has what it waited for."""
        if identity in self._claims:
            residency, claim = self._claims.pop(identity)
            residency.met(claim)

    def drop(self, identity: ModelIdentity) -> None:
        """It waits no more."""
        if identity in self._claims:
            residency, claim = self._claims.pop(identity)
            residency.claims.drop(claim)

    def _found_place(self, identity: ModelIdentity, digest: str) -> bool:
        """Whether a device has room; the claim is on that one then."""
        mine, claim = self._claims[identity]
        if mine.has_room(claim):
            return True
        for other in self._devices(digest):
            if other is mine or not other.claims.add(claim):
                continue
            if other.has_room(claim):
                mine.claims.drop(claim)
                self._claims[identity] = other, claim
                return True
            other.claims.withdraw(claim)
        return False

    def _forget_lapsed(self) -> None:
        now = self._clock()
        lapsed = [
            identity
            for identity, (residency, claim) in self._claims.items()
            if claim.until <= now or not residency.in_service
        ]
        for identity in lapsed:
            self.drop(identity)
