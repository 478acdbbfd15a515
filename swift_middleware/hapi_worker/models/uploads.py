"""One upload of a model at a time, however many jobs ask for it.

A package that cannot be used is not received and tried again for each
repetition: its refusal is remembered for a while.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from hapi_protocol.errors import (
    ConflictError,
    HapiError,
    UnavailableError,
    make_error,
)
from hapi_protocol.job_messages import ModelIdentity
from hapi_worker.peer import POLL_SECONDS
from hapi_worker.scheduling.fair_queue import last_of_most

GRACE_SECONDS = 10.0
"""An asker that was told to upload must begin within this time."""
RETRY_SECONDS = 5.0
REFUSAL_SECONDS = 300.0
"""A package that was refused is refused unread for this time."""
MAX_REFUSALS = 256
_DIGEST = re.compile(r"(?<![0-9a-fA-F])[0-9a-fA-F]{64}(?![0-9a-fA-F])")


@dataclass
class _Upload:
    """An upload that was asked for (until ``expires``) or has begun."""

    expires: float
    begun: bool = False
    error: HapiError | None = None


@dataclass(eq=False)
class _Waiter:
    account: str
    turned_away: bool = False


class Uploads:
    """Who uploads which model, and who waits for it.

    Args:
        changed: condition that guards the models; :meth:`wait` is called
            with it held.
        wait_seconds: how long a job waits for another one's upload.
        max_waiting: how many jobs may wait so.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        changed: threading.Condition,
        *,
        wait_seconds: float,
        max_waiting: int,
        clock: Callable[[], float],
    ) -> None:
        self._changed = changed
        self._wait_seconds = wait_seconds
        self._max_waiting = max_waiting
        self._clock = clock
        self._uploads: dict[ModelIdentity, _Upload] = {}
        self._refusals: OrderedDict[ModelIdentity, tuple[float, HapiError]]
        self._refusals = OrderedDict()
        self._waiting: list[_Waiter] = []

    def wait(
        self, identity: ModelIdentity, deadline: float, account: str
    ) -> None:
        """Returns when something has changed, or after a while.

        Args:
            identity: of the model that is waited for.
            deadline: on the clock.
            account: that is charged.

        Raises:
            ConflictError: ``model_needed``: the caller is the one to upload.
            UnavailableError: none came by ``deadline``, or too many wait.
            HapiError: the one that refused the upload it waited for, or
                one not long ago.
        """
        now = self._clock()
        self._raise_refusal(identity, now)
        self._forget_unused(now)
        upload = self._uploads.get(identity)
        if upload is None:
            self._uploads[identity] = _Upload(now + GRACE_SECONDS)
            raise ConflictError(
                "model_needed",
                f"the model {identity.path} is not in memory here: send it "
                "with PUT /models, then repeat the request",
                object_name=identity.path,
            )
        if now >= deadline:
            raise busy(
                "worker_unavailable",
                f"the upload of the model {identity.path} took longer than "
                f"{self._wait_seconds:g} s",
            )
        until = deadline if upload.begun else min(deadline, upload.expires)
        self.pause(until - now, account)
        if upload.error is not None:
            raise copied(upload.error)

    def is_awaited(self, identity: ModelIdentity) -> bool:
        """Whether somebody uploads it, or was told to; called with the lock
        held."""
        self._forget_unused(self._clock())
        return identity in self._uploads

    def pause(self, seconds: float, account: str) -> None:
        """Waits for a change, for a while at most; with the lock held.

        Raises:
            UnavailableError: too many wait, and no account has more of them
                than this one.
        """
        waiter = _Waiter(account)
        self._waiting.append(waiter)
        if len(self._waiting) > self._max_waiting:
            last = last_of_most(self._waiting)
            self._waiting.remove(last)
            last.turned_away = True
            self._changed.notify_all()
        if not waiter.turned_away:
            self._changed.wait(min(seconds, POLL_SECONDS))
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        else:
            raise busy(
                "queue_full",
                f"{self._max_waiting} jobs wait for models already, and of "
                f"no account more than of {account}",
            )

    def num_waiting(self) -> int:
        """Jobs that wait for an upload, or for room."""
        return len(self._waiting)

    def check(self, identity: ModelIdentity) -> None:
        """
        Raises:
            HapiError: the one that refused the same package not long ago.
        """
        with self._changed:
            self._raise_refusal(identity, self._clock())

    def begin(self, identity: ModelIdentity) -> None:
        """The package's bytes are about to arrive."""
        with self._changed:
            self._uploads.setdefault(identity, _Upload(0.0)).begun = True

    def end(
        self, identity: ModelIdentity, error: HapiError | None = None
    ) -> None:
        """Wakes those who wait.

        Args:
            error: what makes every upload of these bytes fail; None when
                it succeeded, or may succeed when another one tries. It is
                remembered, except ``does_not_fit``, which is about the
                memory and not about the package.
        """
        with self._changed:
            if error is not None and error.code != "does_not_fit":
                self._remember(identity, error)
            upload = self._uploads.pop(identity, None)
            if upload is not None:
                upload.error = error
            self._changed.notify_all()

    def _remember(self, identity: ModelIdentity, error: HapiError) -> None:
        expires = self._clock() + REFUSAL_SECONDS
        self._refusals[identity] = expires, copied(error)
        self._refusals.move_to_end(identity)
        while len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)

    def _raise_refusal(self, identity: ModelIdentity, now: float) -> None:
        expires, error = self._refusals.get(identity, (0.0, None))
        if error is None:
            return
        if now < expires:
            raise copied(error)
        del self._refusals[identity]

    def _forget_unused(self, now: float) -> None:
        unused = [
            identity
            for identity, upload in self._uploads.items()
            if not upload.begun and upload.expires <= now
        ]
        for identity in unused:
            del self._uploads[identity]


def check_name(identity: ModelIdentity, digest: str) -> None:
    """A package named after a sha256 must have it.

    Raises:
        ConflictError: ``digest_mismatch``.
    """
    named = _DIGEST.findall(identity.object)
    if named and digest not in [name.lower() for name in named]:
        raise ConflictError(
            "digest_mismatch",
            f"the package {identity.path} has the sha256 {digest}, which is "
            "not the one in its name: upload it again",
            object_name=identity.path,
            details={"digest": digest},
        )


def busy(code: str, message: str, **details: int) -> UnavailableError:
    """503 with ``Retry-After``."""
    return UnavailableError(
        code, message, retry_after=RETRY_SECONDS, details=details
    )


def copied(error: HapiError) -> HapiError:
    """The same error, to be raised in another thread."""
    return make_error(
        error.code,
        error.message,
        object_name=error.object_name,
        details=error.details,
    )
