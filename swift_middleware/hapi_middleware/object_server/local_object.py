"""Reads an object from the object server to the right of the filter."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from swift.common.swob import Request, Response, wsgi_quote
from swift.common.utils import drain_and_close

from hapi_middleware.concurrency import yielding
from hapi_middleware.requests.annotation_request import Env
from hapi_middleware.requests.subrequests import ObjectBody, ObjectHead
from hapi_protocol.backend import HEADER_POLICY, JobOrder

_FOREIGN = (
    "X-Static-Large-Object",
    "X-Object-Manifest",
    "X-Object-Sysmeta-Ec-",
    "X-Object-Sysmeta-Crypto-",
    "X-Object-Sysmeta-Symlink-",
    "X-Object-Transient-Sysmeta-Crypto-",
)
"""Headers, or their beginnings, of objects whose stored bytes are not those
of the user."""
_STALE_STATUS = 412


class NotHereError(Exception):
    """The bytes are not on this disk, or not as the job names them.

    Attributes:
        status: HTTP status for the proxy, which asks another object server.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class LocalObject:
    """The bytes of a job's object, or of a part of it; iterated once.

    Args:
        app: the object server.
        env: of the proxy's request.
        order: the order of the job.

    Raises:
        NotHereError: the object is not readable here as the job names it.
    """

    def __init__(self, app: Any, env: Env, order: JobOrder) -> None:
        job, part = order.job, order.part
        # "If-Match" compares with the stored bytes: an ETag of other bytes
        # that Swift shows to users (manifests, fragments) does not match.
        headers = {
            "If-Match": f'"{job.source_etag}"',
            HEADER_POLICY: env.get("HTTP_X_BACKEND_STORAGE_POLICY_INDEX", "0"),
            "X-Trans-Id": job.trans_id,
        }
        if part is not None:
            headers["Range"] = str(part)
        request = Request.blank(
            wsgi_quote(env["PATH_INFO"]),
            environ={
                key: env[key]
                for key in ("swift.trans_id", "REMOTE_ADDR", "wsgi.errors")
                if key in env
            },
            headers=headers,
        )
        response = request.get_response(app)
        expected = part.length_bytes if part else job.source_length_bytes
        try:
            _check(response, job.source_etag, expected, is_part=bool(part))
        except NotHereError:
            drain_and_close(response)
            raise
        head = ObjectHead.from_response(response)
        self._body = ObjectBody(
            response,
            expected or 0,
            job.source_name,
            None if part else head.md5,
        )

    def __iter__(self) -> Generator[bytes, None, None]:
        return yielding(self._body)

    def close(self) -> None:
        """Closes the object's file.  Idempotent."""
        self._body.close()


def _check(
    response: Response, etag: str, expected: int | None, *, is_part: bool
) -> None:
    status = response.status_int
    if status == 416:
        raise NotHereError(_STALE_STATUS, "the object is shorter here")
    if not response.is_success:
        raise NotHereError(status, f"the object server answers {status}")
    for name in response.headers:
        if name.title().startswith(_FOREIGN):
            raise NotHereError(422, f"the object has the header {name}")
    found = ObjectHead.from_response(response)
    if (status, found.etag, found.length_bytes) != (
        206 if is_part else 200,
        etag,
        expected,
    ):
        raise NotHereError(_STALE_STATUS, "another version is here")
