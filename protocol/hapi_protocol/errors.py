"""The tree of all errors that users and operators meet.

::

    HapiError
    ├── AnnotationError      400  the request's annotation is wrong
    ├── RightsError          401, 403  as Swift answers the plain GET
    │   └── NotFoundError    404  no such object, or it may not be seen
    ├── MethodError          405  the resource does not have this method
    ├── ConflictError        409  the model's bytes are not the expected ones
    ├── SourceChangedError   412  the shard is not the one of the index
    ├── TooLargeError        413  over a limit of the operator
    ├── UnsupportedError     422  not possible with this object or model
    │   ├── DoesNotFitError       needs more memory than available
    │   └── PackageError          not a model package, or a hostile one
    ├── ShareError           429  over the caller's share
    ├── InternalError        500  a bug of ours
    ├── UnavailableError     503  worker down, draining or its queue full
    ├── TooSlowError         504  a deadline passed
    └── ClientError               raised by the client library itself
        ├── TruncatedStreamError  a feature stream without its closing batch
        ├── DataIndexError        the index of the data set is unusable
        ├── LabelError            a sample without a label
        └── FreezeError           the model cannot be split at that place

An error has a ``code`` (a stable word, see :data:`CODES`), the HTTP status,
the object it is about and the transaction id of the request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

CODES: Mapping[str, int] = MappingProxyType(
    {
        "bad_annotation": 400,
        "bad_model": 400,
        "bad_cut": 400,
        "unknown_encoding": 400,
        "unknown_transform": 400,
        "unknown_numerics": 400,
        "bad_samples": 400,
        "bad_range": 400,
        "bad_cache": 400,
        "bad_request": 400,
        "range_not_allowed": 400,
        "conditional_not_allowed": 400,
        "manifest_not_allowed": 400,
        "bad_names": 400,
        "unauthorized": 401,
        "forbidden": 403,
        "compute_not_allowed": 403,
        "multi_not_allowed": 403,
        "not_found": 404,
        "method_not_allowed": 405,
        "model_needed": 409,
        "digest_mismatch": 409,
        "model_changed": 409,
        "job_conflict": 409,
        "source_changed": 412,
        "object_too_large": 413,
        "package_too_large": 413,
        "request_too_large": 413,
        "cut_out_of_range": 422,
        "samples_out_of_range": 422,
        "unsupported_object": 422,
        "unsupported_transform": 422,
        "unsupported_numerics": 422,
        "empty_shard": 422,
        "damaged_shard": 422,
        "limit_exceeded": 422,
        "bad_package": 422,
        "package_is_manifest": 422,
        "does_not_fit": 422,
        "share_exceeded": 429,
        "internal": 500,
        "worker_unavailable": 503,
        "queue_full": 503,
        "draining": 503,
        "service_unavailable": 503,
        "source_damaged": 503,
        "too_slow": 504,
        "truncated": 0,
        "bad_index": 0,
        "keys_changed": 0,
        "missing_label": 0,
        "bad_sample": 0,
        "unknown_freeze": 0,
        "cannot_freeze": 0,
        "cannot_trace": 0,
        "unknown_op": 0,
        "not_connected": 0,
        "no_hapi": 0,
        "unsupported_version": 0,
        "bad_configuration": 0,
        "bad_state": 0,
    }
)
"""HTTP status of each code; 0 for errors of the client library."""

MAX_BODY_BYTES = 64 * 1024
"""Maximum length of an error body; a longer one is not parsed."""


_CODE_LABEL = "code "


PACKAGE_REFUSED = "package_refused"
"""Detail of an error: the worker does not take a package that may be good."""


class HapiError(Exception):
    """Base of all errors that a user or an operator can meet.

    Args:
        code: a key of :data:`CODES`.
        message: one sentence with the thing, its value and the remedy.
            Without it, ``code`` is a whole traceback that ends with such an
            error: torch re-raises errors of loader workers so.
        object_name: path of the Swift object it is about, if any.
        trans_id: ``X-Trans-Id`` of the request, if there was one.
        retry_after: seconds after which a retry may succeed.
        details: further JSON values (``needed_bytes``, ``allowed``, …).
        status: HTTP status, if it is not the code's usual one.

    Raises:
        KeyError: :data:`CODES` does not have the code.
    """

    def __init__(
        self,
        code: str,
        message: str | None = None,
        *,
        object_name: str | None = None,
        trans_id: str | None = None,
        retry_after: float | None = None,
        details: Mapping[str, Any] | None = None,
        status: int | None = None,
    ) -> None:
        if message is None:
            code, message = _find_code(code), code
        super().__init__(message)
        self.code = code
        self.message = message
        self.object_name = object_name
        self.trans_id = trans_id
        self.retry_after = retry_after
        self.details = dict(details or {})
        self.status = CODES[code] if status is None else status

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own reduction calls the class with ``args`` only.
        return (_rebuild, (type(self), self._state()))

    def _state(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "message": self.message,
            "object_name": self.object_name,
            "trans_id": self.trans_id,
            "retry_after": self.retry_after,
            "details": self.details,
            "status": self.status,
        }

    def __str__(self) -> str:
        facts = [f"{_CODE_LABEL}{self.code}"]
        if self.object_name:
            facts.append(f"object {self.object_name}")
        if self.trans_id:
            facts.append(f"transaction {self.trans_id}")
        return f"{self.message} ({', '.join(facts)})"

    def to_body(self) -> bytes:
        """The JSON body that carries this error over HTTP."""
        body = {
            **self.details,
            "code": self.code,
            "message": self.message,
            "trans_id": self.trans_id,
        }
        if self.object_name:
            body["object"] = self.object_name
        return json.dumps(body).encode() + b"\n"


def _find_code(traceback: str) -> str:
    *_, end = traceback.rpartition(f"({_CODE_LABEL}")
    word = re.match(r"\w+", end)
    return word[0] if word and word[0] in CODES else "internal"


def _rebuild(kind: type[HapiError], state: dict[str, Any]) -> HapiError:
    return kind(**state)


class AnnotationError(HapiError):
    """400: the annotation of the request is wrong."""


class RightsError(HapiError):
    """401 or 403, exactly as Swift's plain GET answers."""


class NotFoundError(RightsError):
    """404: there is no such container or object, or it may not be seen."""


class MethodError(HapiError):
    """405: this resource does not have the method."""


class ConflictError(HapiError):
    """409: the bytes of the model are not the expected ones."""


class SourceChangedError(HapiError):
    """412: the object is not the one the caller's index describes."""


class TooLargeError(HapiError):
    """413: over a limit set by the operator."""


class UnsupportedError(HapiError):
    """422: understood, but not possible with this object or model."""


class DoesNotFitError(UnsupportedError):
    """422: needs more memory than available; see ``details``."""


class PackageError(UnsupportedError):
    """422: these bytes are not a model package, or a hostile one."""


class ShareError(HapiError):
    """429: the caller asks for more than its share."""


class InternalError(HapiError):
    """500: a bug of ours."""


class UnavailableError(HapiError):
    """503: worker down, draining, or its queue full; retry later."""


class TooSlowError(HapiError):
    """504: a deadline passed."""


class ClientError(HapiError):
    """Base of the errors that the client library itself raises."""


class TruncatedStreamError(ClientError):
    """A feature stream ended without its closing batch."""


class DataIndexError(ClientError):
    """The index of a data set is missing, damaged or out of date."""


class LabelError(ClientError):
    """A sample has no label."""


class FreezeError(ClientError):
    """The model cannot be split at the requested place."""


_BY_STATUS: Mapping[int, type[HapiError]] = MappingProxyType(
    {
        0: ClientError,
        400: AnnotationError,
        401: RightsError,
        403: RightsError,
        404: NotFoundError,
        405: MethodError,
        409: ConflictError,
        412: SourceChangedError,
        413: TooLargeError,
        422: UnsupportedError,
        429: ShareError,
        500: InternalError,
        503: UnavailableError,
        504: TooSlowError,
    }
)
_BY_CODE: Mapping[str, type[HapiError]] = MappingProxyType(
    {
        "does_not_fit": DoesNotFitError,
        "bad_package": PackageError,
        "package_is_manifest": PackageError,
        "truncated": TruncatedStreamError,
        "bad_index": DataIndexError,
        "missing_label": LabelError,
        "unknown_freeze": FreezeError,
        "cannot_freeze": FreezeError,
        "cannot_trace": FreezeError,
        "unknown_op": FreezeError,
    }
)
_CODE_OF_STATUS: Mapping[int, str] = MappingProxyType(
    {
        400: "bad_request",
        401: "unauthorized",
        403: "forbidden",
        404: "not_found",
        405: "method_not_allowed",
        409: "job_conflict",
        412: "source_changed",
        413: "object_too_large",
        416: "bad_range",
        422: "unsupported_object",
        429: "share_exceeded",
        498: "share_exceeded",
        500: "internal",
        503: "service_unavailable",
        504: "too_slow",
    }
)


def make_error(code: str, message: str, **facts: Any) -> HapiError:
    """Makes an error of the class that belongs to ``code``.

    Args:
        code: a key of :data:`CODES`.
        message: message of the :class:`HapiError`.
        **facts: keyword arguments of :class:`HapiError`.
    """
    kind = _BY_CODE.get(code) or _BY_STATUS[CODES[code]]
    return kind(code, message, **facts)


def error_from_body(
    status: int,
    body: bytes,
    *,
    object_name: str | None = None,
    trans_id: str | None = None,
    retry_after: float | None = None,
) -> HapiError:
    """Makes the error that an HTTP answer reports.

    Bodies that are not ours (Swift's own HTML pages, a gateway's text)
    give an error by status, with the start of the body in its message.

    Args:
        status: HTTP status, 400 or more.
        body: the answer's body, or its start.
        object_name: path of the requested object.
        trans_id: ``X-Trans-Id`` of the answer.
        retry_after: seconds, from ``Retry-After``.
    """
    fields = _parse_body(body)
    code = fields.pop("code", None)
    message = fields.pop("message", None)
    trans_id = trans_id or fields.pop("trans_id", None)
    fields.pop("trans_id", None)
    object_name = fields.pop("object", None) or object_name
    if code not in CODES or not isinstance(message, str):
        code = _CODE_OF_STATUS.get(
            status, "internal" if status >= 500 else "bad_request"
        )
        text = body[:200].decode("utf-8", "replace").strip()
        message = f"the server answered {status}: {text or 'no body'}"
    return make_error(
        code,
        message,
        object_name=object_name,
        trans_id=trans_id,
        retry_after=retry_after,
        details=fields,
        status=status,
    )


def _parse_body(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_BODY_BYTES:
        return {}
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
