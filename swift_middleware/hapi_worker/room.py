"""Who waits for room for which model, on which device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hapi_protocol.messages import ModelIdentity
from hapi_worker.claims import Claim
from hapi_worker.residency import Residency
from hapi_worker.uploads import GRACE_SECONDS, RETRY_SECONDS

SEEN_SECONDS = 2 * RETRY_SECONDS
"""How long a claim holds after the last time that somebody saw to it: who was
told to come again has it still."""


class Room:
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
        self._claims: dict[ModelIdentity, tuple[Residency, Claim]] = {}

    def is_there(
        self, identity: ModelIdentity, digest: str, needed_bytes: int
    ) -> bool:
        """Whether the model can come; if not, it waits for its turn.

        Args:
            identity: of the model.
            digest: of its package, or empty.
            needed_bytes: for parameters and one sample.
        """
        self.claim(identity, digest, needed_bytes)
        if identity not in self._claims:
            # It can never, or no device is left; it will be told so.
            return True
        residency, claim = self._claims[identity]
        if not residency.has_room(claim):
            return False
        self.see_to(identity, GRACE_SECONDS)
        return True

    def claim(
        self, identity: ModelIdentity, digest: str, needed_bytes: int
    ) -> None:
        """Somebody waits for it now; as :meth:`is_there`."""
        self.see_to(identity, SEEN_SECONDS, digest)
        if identity in self._claims:
            residency, claim = self._claims[identity]
            needed_bytes = max(needed_bytes, claim.num_bytes)
            claim.num_bytes = min(needed_bytes, residency.limit_bytes)
            return
        for residency in self._devices(digest):
            if needed_bytes <= residency.limit_bytes:
                now = self._clock()
                claim = Claim(
                    identity.account,
                    needed_bytes,
                    now,
                    now + SEEN_SECONDS,
                    digest,
                )
                residency.claims.add(claim)
                self._claims[identity] = residency, claim
                return

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

    def _forget_lapsed(self) -> None:
        now = self._clock()
        lapsed = [
            identity
            for identity, (_, claim) in self._claims.items()
            if claim.until <= now
        ]
        for identity in lapsed:
            residency, claim = self._claims.pop(identity)
            residency.claims.drop(claim)
