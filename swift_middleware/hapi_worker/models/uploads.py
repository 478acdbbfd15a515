"""Uploads of models: one at a time per model, however many jobs need it.

The refusal of an unusable package is remembered for a while, so that it is
not received and validated again for each retry.
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
from hapi_worker.scheduling.fair_queue import last_of_busiest

GRACE_SECONDS = 10.0
"""Time within which a caller must start an upload that it was asked for."""
RETRY_SECONDS = 5.0
REFUSAL_SECONDS = 300.0
"""Time for which a refused package is refused unread."""
MAX_REFUSALS = 256
_DIGEST = re.compile(r"(?<![0-9a-fA-F])[0-9a-fA-F]{64}(?![0-9a-fA-F])")


@dataclass
class _Upload:
    """An upload that was requested (until ``expires``) or has begun.

    Attributes:
        account: account for whose job it was requested.
    """

    expires: float
    account: str
    begun: bool = False
    error: HapiError | None = None


@dataclass(eq=False)
class _Waiter:
    account: str
    turned_away: bool = False


class Uploads:
    """Requested and running uploads, and the jobs that wait for them.

    Args:
        changed: condition that guards the models; :meth:`wait` is called
            with it held.
        wait_seconds: longest wait of a job for another job's upload.
        max_waiting: number of jobs that may wait.
        clock: monotonic seconds.
        check_worker: raises an error if no package can be validated now.
    """

    def __init__(
        self,
        changed: threading.Condition,
        *,
        wait_seconds: float,
        max_waiting: int,
        clock: Callable[[], float],
        check_worker: Callable[[], None] = lambda: None,
    ) -> None:
        self._changed = changed
        self._check_worker = check_worker
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
        """Waits for an upload; returns after a change, or after a while.

        Args:
            identity: identity of the model.
            deadline: end of the wait, on the clock.
            account: the charged account.

        Raises:
            ConflictError: ``model_needed``: the caller must upload it.
            UnavailableError: ``deadline`` has passed, or too many jobs wait.
            HapiError: the refusal of this upload, or of an earlier one of the
                same package.
        """
        now = self._clock()
        self._raise_refusal(identity, now)
        self._forget_unused(now)
        upload = self._uploads.get(identity)
        if upload is None:
            self._uploads[identity] = _Upload(now + GRACE_SECONDS, account)
            raise ConflictError(
                "model_needed",
                f"the model {identity.path} is not in this worker's memory: "
                "send it with PUT /models, then repeat the request",
                object_name=identity.path,
            )
        if now >= deadline:
            raise too_busy_error(
                "worker_unavailable",
                f"the upload of the model {identity.path} took longer than "
                f"{self._wait_seconds:g} s",
            )
        until = deadline if upload.begun else min(deadline, upload.expires)
        self.pause(until - now, account)
        if upload.error is not None:
            raise copy_of_error(upload.error)

    def is_awaited(self, identity: ModelIdentity) -> bool:
        """Returns True if an upload was requested or has begun; called with
        the lock held."""
        self._forget_unused(self._clock())
        return identity in self._uploads

    def pause(self, seconds: float, account: str) -> None:
        """Waits for a change, for a while at most; with the lock held.

        Raises:
            UnavailableError: too many jobs wait, and this one is the newest
                of an account with the most of them.
        """
        waiter = _Waiter(account)
        self._waiting.append(waiter)
        if len(self._waiting) > self._max_waiting:
            last = last_of_busiest(self._waiting)
            self._waiting.remove(last)
            last.turned_away = True
            self._changed.notify_all()
        if not waiter.turned_away:
            self._changed.wait(min(seconds, POLL_SECONDS))
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        else:
            raise too_busy_error(
                "queue_full",
                f"{self._max_waiting} jobs wait for models already, and no "
                f"account has more of them than {account}",
            )

    def num_waiting(self) -> int:
        """Number of jobs that wait for an upload, or for memory."""
        return len(self._waiting)

    def check(self, identity: ModelIdentity) -> None:
        """Refuses a package that was refused not long ago.

        Raises:
            HapiError: the earlier refusal, or no package can be validated.
        """
        self._check_worker()
        with self._changed:
            self._raise_refusal(identity, self._clock())

    def begin(self, identity: ModelIdentity) -> str:
        """Records that the package's bytes are about to arrive.

        Returns:
            The account for whose job it was requested, or its own.
        """
        unasked = _Upload(0.0, identity.account)
        with self._changed:
            upload = self._uploads.setdefault(identity, unasked)
            upload.begun = True
            return upload.account

    def end(
        self, identity: ModelIdentity, error: HapiError | None = None
    ) -> None:
        """Ends an upload and wakes the jobs that wait for it.

        Args:
            identity: identity of the model.
            error: the refusal of every upload of these bytes; None if the
                upload succeeded, or may succeed later.  It is remembered,
                except ``does_not_fit``, which depends on the memory and not
                on the package.
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
        self._refusals[identity] = expires, copy_of_error(error)
        self._refusals.move_to_end(identity)
        while len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)

    def _raise_refusal(self, identity: ModelIdentity, now: float) -> None:
        expires, error = self._refusals.get(identity, (0.0, None))
        if error is None:
            return
        if now < expires:
            raise copy_of_error(error)
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
    """Checks that a package named after a sha256 has that sha256.

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


def too_busy_error(
    code: str, message: str, **details: int
) -> UnavailableError:
    """Makes an error with status 503 and ``Retry-After``."""
    return UnavailableError(
        code, message, retry_after=RETRY_SECONDS, details=details
    )


def copy_of_error(error: HapiError) -> HapiError:
    """Copies an error, to raise it in another thread."""
    return make_error(
        error.code,
        error.message,
        object_name=error.object_name,
        details=error.details,
    )
