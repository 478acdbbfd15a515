"""What the filter and its worker say to each other (JSON over HTTP/1.1).

Both ends run on one host and come from one release, yet a message is read
strictly: the worker holds the memory of many tenants and trusts no field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hapi_protocol.encodings import Encoding
from hapi_protocol.errors import AnnotationError
from hapi_protocol.headers import SampleRange
from hapi_protocol.summary import check_amount
from hapi_protocol.versions import API_VERSION, check_worker_version

HEADER_IDENTITY = "X-Hapi-Identity"
"""JSON of a :class:`ModelIdentity`, on PUT and GET of ``/models``."""

KIND_FEATURES = "features"
KIND_INDEX = "index"
KINDS = (KIND_FEATURES, KIND_INDEX)
OUTCOME_DONE = "done"
OUTCOME_FAILED = "failed"
OUTCOME_GONE = "gone"
OUTCOMES = (OUTCOME_DONE, OUTCOME_FAILED, OUTCOME_GONE)
UNAUTHENTICATED_ACCOUNT = ".unauthenticated"
"""Charged account of callers without a project; no Swift account can have
this name, since an account's name carries its reseller prefix."""

MAX_MESSAGE_BYTES = 64 * 1024

_T = TypeVar("_T")


@dataclass(frozen=True)
class ModelIdentity:
    """Which version of which object a caller has shown to be allowed to GET.

    The worker maps it to the digest of bytes that this very host hashed;
    the name alone identifies nothing.
    """

    account: str
    container: str
    object: str
    etag: str
    length_bytes: int

    @property
    def path(self) -> str:
        return f"/{self.account}/{self.container}/{self.object}"

    def to_fields(self) -> dict[str, Any]:
        return dict(vars(self))

    def to_json(self) -> str:
        """One line of ASCII, fit for a header."""
        return json.dumps(self.to_fields())

    @classmethod
    def from_fields(cls, fields: Any) -> ModelIdentity:
        given = _Fields(fields, "model identity")
        return cls(
            account=given.text("account"),
            container=given.text("container"),
            object=given.text("object"),
            etag=given.text("etag"),
            length_bytes=given.count("length_bytes"),
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelIdentity:
        """
        Raises:
            AnnotationError: ``bad_request``, naming the field.
        """
        return _parse(text, cls.from_fields)


@dataclass(frozen=True)
class JobRequest:
    """Body of ``POST /jobs``: one annotated GET, both rights checked; or
    many, of objects of one container.

    Attributes:
        kind: ``features``, or ``index`` for rows without features.
        charged_account: who pays; never the owner by default.
        model: None exactly for ``index``.
        cut: 1..n; 0 exactly for ``index``.
        encoding: a canonical text of :mod:`hapi_protocol.encodings`.
        transform: one of :mod:`hapi_protocol.transforms`.
        samples: which samples are wanted; None for all.
        ranged: the body holds only the members of ``samples``, so that
            its first sample has the index ``samples.first``.
        source_name: ``/account/container/object``, for messages and as
            the key of a single image.
        source_etag: empty for many objects.
        source_length_bytes: bytes that the job's body will have; None
            exactly for many objects.
        is_split: the answer shall tell what of it may be kept
            (:mod:`hapi_protocol.tee_stream`).
        num_objects: that the body holds, framed as
            :mod:`hapi_protocol.multi_object` says; None for one object as it
            is.
    """

    kind: str
    charged_account: str
    model: ModelIdentity | None
    cut: int
    encoding: str
    transform: str
    numerics: str
    samples: SampleRange | None
    ranged: bool
    source_name: str
    source_etag: str
    source_length_bytes: int | None
    trans_id: str
    is_split: bool = False
    num_objects: int | None = None

    def to_body(self) -> bytes:
        fields = dict(vars(self))
        fields["model"] = self.model.to_fields() if self.model else None
        if self.samples:
            fields["samples"] = [self.samples.first, self.samples.last]
        fields["version"] = API_VERSION
        return json.dumps(fields).encode()

    @classmethod
    def from_body(cls, body: bytes) -> JobRequest:
        """
        Raises:
            AnnotationError: ``bad_request``, naming the field, or
                ``unknown_encoding``.
        """
        return _parse(body, cls._from_fields)

    @classmethod
    def _from_fields(cls, fields: Any) -> JobRequest:
        given = _Fields(fields, "job request")
        given.version()
        num_objects = given.optional_count("num_objects")
        length = given.optional_count("source_length_bytes")
        job = cls(
            kind=given.choice("kind", KINDS),
            charged_account=given.text("charged_account"),
            model=given.optional("model", ModelIdentity.from_fields),
            cut=given.count("cut"),
            encoding=str(Encoding.parse(given.text("encoding"))),
            transform=given.text("transform"),
            numerics=given.text("numerics"),
            samples=given.optional("samples", _parse_samples),
            ranged=given.flag("ranged"),
            source_name=given.text("source_name"),
            source_etag=given.text("source_etag", empty=bool(num_objects)),
            source_length_bytes=length,
            trans_id=given.text("trans_id", empty=True),
            is_split=given.flag("is_split"),
            num_objects=num_objects,
        )
        job._check()
        return job

    def _check(self) -> None:
        with_model = self.kind == KIND_FEATURES
        if (self.model is not None) != with_model or (
            (self.cut > 0) != with_model
        ):
            raise _bad_field("job request", "model", self.model)
        if self.ranged and self.samples is None:
            raise _bad_field("job request", "samples", None)
        is_multi = self.num_objects is not None
        if is_multi and not (with_model and self.num_objects):
            raise _bad_field("job request", "num_objects", self.num_objects)
        if is_multi and self.samples is not None:
            raise _bad_field("job request", "samples", self.samples)
        if is_multi != (self.source_length_bytes is None):
            raise _bad_field(
                "job request", "source_length_bytes", self.source_length_bytes
            )


@dataclass(frozen=True)
class ProfileRequest:
    """Body of ``POST /profiles``: the caller may GET the package.

    Attributes:
        charged_account: pays for the run, if one is needed.
        model: the package.
    """

    charged_account: str
    model: ModelIdentity
    trans_id: str

    def to_body(self) -> bytes:
        fields = {**vars(self), "model": self.model.to_fields()}
        return json.dumps({**fields, "version": API_VERSION}).encode()

    @classmethod
    def from_body(cls, body: bytes) -> ProfileRequest:
        """
        Raises:
            AnnotationError: ``bad_request``, naming the field.
        """
        return _parse(body, cls._from_fields)

    @classmethod
    def _from_fields(cls, fields: Any) -> ProfileRequest:
        given = _Fields(fields, "profile request")
        given.version()
        model = given.optional("model", ModelIdentity.from_fields)
        if model is None:
            raise _bad_field("profile request", "model", None)
        return cls(
            charged_account=given.text("charged_account"),
            model=model,
            trans_id=given.text("trans_id", empty=True),
        )


@dataclass(frozen=True)
class JobGrant:
    """Answer to ``POST /jobs``: send the source's bytes to this job.

    Attributes:
        grant_bytes: source bytes the worker has set room aside for; it
            takes the rest as room comes free.
        model_digest: sha256 of the package, None for ``index`` jobs.
        numerics_tag: numerics class, versions and device kind, part of
            the feature ETag.
    """

    job_id: str
    grant_bytes: int
    model_digest: str | None
    numerics_tag: str

    def to_body(self) -> bytes:
        return json.dumps({**vars(self), "version": API_VERSION}).encode()

    @classmethod
    def from_body(cls, body: bytes) -> JobGrant:
        """
        Raises:
            AnnotationError: ``bad_request``, naming the field.
        """
        return _parse(body, cls._from_fields)

    @classmethod
    def _from_fields(cls, fields: Any) -> JobGrant:
        given = _Fields(fields, "job grant")
        given.version()
        return cls(
            job_id=given.text("job_id"),
            grant_bytes=given.count("grant_bytes"),
            model_digest=given.optional("model_digest", _parse_text),
            numerics_tag=given.text("numerics_tag"),
        )


@dataclass(frozen=True)
class Usage:
    """Answer to ``GET /jobs/<id>``: what a job used until it ended.

    Attributes:
        charged_account: who pays.
        model_digest: sha256 of the package, None for ``index`` jobs.
        cut: 0 for ``index`` jobs.
        samples: rows sent, those with an error included.
        errors: rows sent with an error.
        device_seconds: that the device spent on it, sent or not.
        decode_seconds: of the decoding threads, sent or not.
        cpu_seconds: core-seconds of all stages; on a CPU those of the
            device seconds included, times the threads of a pass.
        source_bytes: read of the source.
        sent_bytes: of the stream.
        outcome: ``done``, ``failed`` or ``gone`` (the reader went away).
        reason: the error's code where it failed, else empty.
    """

    kind: str
    charged_account: str
    model_digest: str | None
    cut: int
    encoding: str
    samples: int
    errors: int
    device_seconds: float
    decode_seconds: float
    cpu_seconds: float
    source_bytes: int
    sent_bytes: int
    outcome: str
    reason: str

    def to_body(self) -> bytes:
        return json.dumps({**vars(self), "version": API_VERSION}).encode()

    @classmethod
    def from_body(cls, body: bytes) -> Usage:
        """
        Raises:
            AnnotationError: ``bad_request``, naming the field.
        """
        return _parse(body, cls._from_fields)

    @classmethod
    def _from_fields(cls, fields: Any) -> Usage:
        given = _Fields(fields, "usage")
        given.version()
        return cls(
            kind=given.choice("kind", KINDS),
            charged_account=given.text("charged_account"),
            model_digest=given.optional("model_digest", _parse_text),
            cut=given.count("cut"),
            encoding=given.text("encoding"),
            samples=given.count("samples"),
            errors=given.count("errors"),
            device_seconds=given.amount("device_seconds"),
            decode_seconds=given.amount("decode_seconds"),
            cpu_seconds=given.amount("cpu_seconds"),
            source_bytes=given.count("source_bytes"),
            sent_bytes=given.count("sent_bytes"),
            outcome=given.choice("outcome", OUTCOMES),
            reason=given.text("reason", empty=True),
        )


def _parse(body: str | bytes, build: Callable[[Any], _T]) -> _T:
    if len(body) > MAX_MESSAGE_BYTES:
        raise AnnotationError(
            "bad_request",
            f"a message of {len(body)} bytes; at most {MAX_MESSAGE_BYTES}",
        )
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise AnnotationError(
            "bad_request", f"a message that is not JSON: {error}"
        ) from error
    return build(fields)


def _parse_text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _bad_field("message", "text", value)
    return value


def _parse_samples(value: Any) -> SampleRange:
    if isinstance(value, list) and len(value) == 2:
        first, last = value
        if _is_count(first) and (
            last is None or (_is_count(last) and last >= first)
        ):
            return SampleRange(first, last)
    raise _bad_field("job request", "samples", value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _bad_field(what: str, name: str, value: Any) -> AnnotationError:
    return AnnotationError(
        "bad_request", f"{what}: field {name!r} is {value!r}"
    )


class _Fields:
    """The fields of one message, read by type."""

    def __init__(self, fields: Any, what: str) -> None:
        if not isinstance(fields, Mapping):
            raise _bad_field(what, "(whole message)", fields)
        self._fields = fields
        self._what = what

    def text(self, name: str, *, empty: bool = False) -> str:
        value = self._fields.get(name)
        if not isinstance(value, str) or not (value or empty):
            raise _bad_field(self._what, name, value)
        return value

    def count(self, name: str) -> int:
        value: Any = self._fields.get(name)
        if not _is_count(value):
            raise _bad_field(self._what, name, value)
        return int(value)

    def optional_count(self, name: str) -> int | None:
        return None if self._fields.get(name) is None else self.count(name)

    def amount(self, name: str) -> float:
        value: Any = self._fields.get(name)
        try:
            check_amount(value, name)
        except ValueError:
            raise _bad_field(self._what, name, value) from None
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._fields.get(name)
        if not isinstance(value, bool):
            raise _bad_field(self._what, name, value)
        return value

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self.text(name)
        if value not in allowed:
            raise _bad_field(self._what, name, value)
        return value

    def optional(self, name: str, build: Callable[[Any], _T]) -> _T | None:
        value = self._fields.get(name)
        return None if value is None else build(value)

    def version(self) -> None:
        check_worker_version(self._fields.get("version"), self._what)
