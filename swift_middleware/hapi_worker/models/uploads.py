"""Uploads of models: one at a time per model, however many jobs need it.

The refusal of an unusable package is remembered for a while, so that it is
not received and validated again for each retry.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from hapi_protocol.errors import (
    ConflictError,
    HapiError,
    UnavailableError,
    make_error,
)
from hapi_protocol.job_messages import ModelIdentity
from hapi_worker.models.loaded_model import touch

GRACE_SECONDS = 10.0
"""Time within which a caller must start an upload that it was asked for."""
RETRY_SECONDS = 5.0
"""Uploads and passes that hold the memory take seconds."""
REFUSAL_SECONDS = 300.0
"""Time for which a refused package is refused unread."""
MAX_REFUSALS = 256
"""A refusal is small; the bound is for hostile callers."""
_DIGEST = re.compile(r"(?<![0-9a-fA-F])[0-9a-fA-F]{64}(?![0-9a-fA-F])")


@dataclass
class Upload:
    """An upload that was requested (until ``expires``) or has begun.

    Attributes:
        account: account for whose job it was requested.
    """

    expires: float
    account: str
    begun: bool = False
    error: HapiError | None = None


@dataclass(eq=False)
class Uploads:
    """Requested and running uploads, and remembered refusals.

    Args:
        changed: condition that guards the models; notified of ended uploads.
        clock: monotonic seconds.
        check_worker: raises an error if no package can be validated now.
    """

    changed: threading.Condition
    _: KW_ONLY
    clock: Callable[[], float]
    check_worker: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._uploads: dict[ModelIdentity, Upload] = {}
        self._refusals: OrderedDict[ModelIdentity, tuple[float, HapiError]]
        self._refusals = OrderedDict()

    def request(self, identity: ModelIdentity, account: str) -> Upload:
        """Returns the upload of a model, requested or begun; with the lock
        held.

        Args:
            identity: identity of the model.
            account: the charged account.

        Raises:
            ConflictError: ``model_needed``: the caller must upload it.
        """
        if not self.is_awaited(identity):
            expires = self.clock() + GRACE_SECONDS
            self._uploads[identity] = Upload(expires, account)
            raise ConflictError(
                "model_needed",
                f"the model {identity.path} is not in this worker's memory: "
                "send it with PUT /models, then repeat the request",
                object_name=identity.path,
            )
        return self._uploads[identity]

    def is_awaited(self, identity: ModelIdentity) -> bool:
        """Returns True if an upload was requested or has begun; called with
        the lock held."""
        now = self.clock()
        self._uploads = {
            known: upload
            for known, upload in self._uploads.items()
            if upload.begun or now < upload.expires
        }
        return identity in self._uploads

    def check(self, identity: ModelIdentity) -> None:
        """Refuses a package that was refused not long ago.

        Raises:
            HapiError: the earlier refusal, or no package can be validated.
        """
        self.check_worker()
        with self.changed:
            expires, error = self._refusals.get(identity, (0.0, None))
            if error is not None and self.clock() < expires:
                raise copy_of_error(error)

    def begin(self, identity: ModelIdentity) -> str:
        """Records that the package's bytes are about to arrive.

        Returns:
            The account for whose job it was requested, or its own.
        """
        unasked = Upload(0.0, identity.account)
        with self.changed:
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
        with self.changed:
            if error is not None and error.code != "does_not_fit":
                self._remember(identity, error)
            upload = self._uploads.pop(identity, None)
            if upload is not None:
                upload.error = error
            self.changed.notify_all()

    def _remember(self, identity: ModelIdentity, error: HapiError) -> None:
        expires = self.clock() + REFUSAL_SECONDS
        self._refusals[identity] = expires, copy_of_error(error)
        touch(self._refusals, identity, MAX_REFUSALS)


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
