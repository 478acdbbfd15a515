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
from functools import partial
from types import MappingProxyType
from typing import Any

MAX_BODY_BYTES = 64 * 1024
"""Maximum length of an error body; a longer one is not parsed.  Ours have some
hundred bytes, so that a proxy's page costs no more than this."""
_CODE_LABEL = "code "
_STATE = (
    *("code", "message", "object_name", "trans_id", "retry_after"),
    *("details", "status"),
)
"""Arguments, and attributes, of an error."""
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
        state = {name: getattr(self, name) for name in _STATE}
        return partial(type(self), **state), ()

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


_STATUSES: tuple[tuple[int, type[HapiError], str], ...] = (
    (
        0,
        ClientError,
        "keys_changed bad_sample not_connected no_hapi unsupported_version "
        "bad_configuration bad_state worker_lost queue_lost",
    ),
    (0, TruncatedStreamError, "truncated"),
    (0, DataIndexError, "bad_index"),
    (0, LabelError, "missing_label"),
    (0, FreezeError, "unknown_freeze cannot_freeze cannot_trace unknown_op"),
    (
        400,
        AnnotationError,
        "bad_request bad_annotation bad_model bad_cut unknown_encoding "
        "unknown_transform unknown_numerics bad_samples bad_range bad_cache "
        "range_not_allowed conditional_not_allowed manifest_not_allowed "
        "bad_names",
    ),
    (401, RightsError, "unauthorized"),
    (403, RightsError, "forbidden compute_not_allowed multi_not_allowed"),
    (404, NotFoundError, "not_found"),
    (405, MethodError, "method_not_allowed"),
    (
        409,
        ConflictError,
        "job_conflict model_needed digest_mismatch model_changed",
    ),
    (412, SourceChangedError, "source_changed"),
    (
        413,
        TooLargeError,
        "object_too_large package_too_large request_too_large",
    ),
    (
        422,
        UnsupportedError,
        "unsupported_object cut_out_of_range samples_out_of_range "
        "unsupported_transform unsupported_numerics empty_shard "
        "damaged_shard limit_exceeded",
    ),
    (422, PackageError, "bad_package package_is_manifest"),
    (422, DoesNotFitError, "does_not_fit"),
    (429, ShareError, "share_exceeded"),
    (500, InternalError, "internal"),
    (
        503,
        UnavailableError,
        "service_unavailable worker_unavailable queue_full draining "
        "source_damaged",
    ),
    (504, TooSlowError, "too_slow"),
)
"""Status, class, and codes.  The first code of a status stands for answers
that are not ours."""
CODES: Mapping[str, int] = MappingProxyType(
    {c: status for status, _, codes in _STATUSES for c in codes.split()}
)
"""HTTP status of each code; 0 for errors of the client library."""
_CLASSES = MappingProxyType(
    {c: kind for _, kind, codes in _STATUSES for c in codes.split()}
)
_CODE_OF_STATUS = MappingProxyType(
    {s: code for code, s in [*CODES.items()][::-1] if s}
    # Status of Swift for ranges out of range, and for its rate limits.
    | {416: "bad_range", 498: "share_exceeded"}
)


def make_error(code: str, message: str, **facts: Any) -> HapiError:
    """Makes an error of the class that belongs to ``code``.

    Args:
        code: a key of :data:`CODES`.
        message: message of the :class:`HapiError`.
        **facts: keyword arguments of :class:`HapiError`.
    """
    return _CLASSES[code](code, message, **facts)


def cannot_freeze(message: str) -> FreezeError:
    """Makes the error of a model that cannot be split as requested."""
    return FreezeError("cannot_freeze", message)


def bad_package(message: str) -> PackageError:
    """Makes the error of bytes that are no model package."""
    return PackageError("bad_package", message)


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
