"""Messages between the filter and its worker (JSON over HTTP/1.1).

Both ends run on one host and come from one release, but messages are read
strictly: the worker holds the memory of many tenants and trusts no field.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from hapi_protocol.encodings import Encoding
from hapi_protocol.headers import SampleRange
from hapi_protocol.json_messages import (
    FieldError,
    JsonMessage,
    PossiblyEmpty,
    one_of,
    parse_object,
    read_count,
    read_message_fields,
    read_text,
)

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
"""Charged account of callers without a project.  No Swift account can have
this name, because account names begin with the reseller prefix."""


def _read_encoding(value: Any) -> str:
    return str(Encoding.parse(read_text(value)))


def _read_samples(value: Any) -> SampleRange:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{value!r:.80} is not a pair")
    first = read_count(value[0])
    last = None if value[1] is None else read_count(value[1])
    if last is not None and last < first:
        raise ValueError(f"{last} is less than {first}")
    return SampleRange(first, last)


@dataclass(frozen=True)
class ModelIdentity:
    """One version of one object that the caller may GET.

    The worker maps it to the digest of bytes that this host has hashed; the
    name alone identifies nothing.
    """

    account: str
    container: str
    object: str
    etag: str
    length_bytes: int

    @property
    def path(self) -> str:
        """``/account/container/object``."""
        return f"/{self.account}/{self.container}/{self.object}"

    def to_json(self) -> str:
        """The identity as one line of ASCII, for a header."""
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelIdentity:
        """Reads an identity.

        Raises:
            AnnotationError: ``bad_request``, names the field.
        """
        what = "model identity"
        return read_message_fields(cls, parse_object(text, what), what)


@dataclass(frozen=True)
class JobRequest(JsonMessage):
    """Body of ``POST /jobs``: an authorised request for one or many objects.

    Attributes:
        kind: ``features``, or ``index`` for rows without features.
        charged_account: account that pays; the caller's, not the owner's.
        model: None exactly for ``index``.
        cut: 1..n; 0 exactly for ``index``.
        encoding: a canonical text of :mod:`hapi_protocol.encodings`.
        transform: one of :mod:`hapi_protocol.transforms`.
        numerics: one of :data:`hapi_protocol.headers.NUMERICS`.
        samples: the samples that are requested; None for all.
        ranged: the body holds only the members of ``samples``: its first
            sample has the index ``samples.first``.
        source_name: ``/account/container/object``, for messages and as the
            key of a single image.
        source_etag: empty exactly for many objects.
        source_length_bytes: length of the job's body; None exactly for many
            objects.
        trans_id: transaction id of the client's request.
        is_split: the answer marks the bytes that may be cached
            (:mod:`hapi_protocol.tee_stream`).
        num_objects: number of objects in the body, framed as in
            :mod:`hapi_protocol.multi_object`; None for one unframed object.
        crc32s: CRC-32 that each of the samples must have; empty if they are
            not known.
        request_objects: number of objects in the client's request, if the
            body has some of them only; the rows are then merged with those
            of other jobs (:mod:`hapi_protocol.merged_stream`).
        span_samples: number of samples by which batches are sized, if the
            request has fewer.
    """

    NAME = "job request"

    kind: Annotated[str, one_of(*KINDS)]
    charged_account: str
    model: ModelIdentity | None
    cut: int
    encoding: Annotated[str, _read_encoding]
    transform: str
    numerics: str
    samples: Annotated[SampleRange, _read_samples] | None
    ranged: bool
    source_name: str
    source_etag: PossiblyEmpty
    source_length_bytes: int | None
    trans_id: PossiblyEmpty
    is_split: bool = False
    num_objects: int | None = None
    crc32s: tuple[int, ...] = ()
    request_objects: int | None = None
    span_samples: int = 0

    @property
    def is_merged(self) -> bool:
        """The rows are to be merged with those of other jobs."""
        return self.request_objects is not None

    def check(self) -> None:
        """Raises FieldError if the fields contradict each other."""
        has_model = self.kind == KIND_FEATURES
        is_multi = self.num_objects is not None
        has_samples = self.samples is not None
        rules = (
            ("model", (self.model is not None) == has_model),
            ("cut", (self.cut > 0) == has_model),
            ("samples", has_samples or not self.ranged),
            ("crc32s", self.ranged or not self.crc32s),
            ("samples", not (is_multi and has_samples)),
            ("num_objects", not is_multi or has_model),
            ("num_objects", self.num_objects != 0),
            ("request_objects", is_multi or not self.is_merged),
            ("source_etag", is_multi or self.source_etag != ""),
            (
                "source_length_bytes",
                is_multi == (self.source_length_bytes is None),
            ),
        )
        for name, is_valid in rules:
            if not is_valid:
                raise FieldError(name, getattr(self, name))


@dataclass(frozen=True)
class ProfileRequest(JsonMessage):
    """Body of ``POST /profiles``: a package that the caller may GET.

    Attributes:
        charged_account: account that pays for a measurement, if one is made.
        model: the package.
        trans_id: transaction id of the client's request.
    """

    NAME = "profile request"

    charged_account: str
    model: ModelIdentity
    trans_id: PossiblyEmpty


@dataclass(frozen=True)
class JobGrant(JsonMessage):
    """Answer to ``POST /jobs``: the source's bytes may be sent to this job.

    Attributes:
        job_id: id of the job.
        grant_bytes: source bytes for which the worker has reserved memory;
            it reads the rest as memory becomes free.
        model_digest: sha256 of the package; None for ``index`` jobs.
        numerics_tag: numerics class, versions and device kind, part of the
            feature ETag.
        lifetime_seconds: time after which an unused grant lapses.
        jobs: jobs that run and wait at the worker, this one included; None
            from a worker of an earlier release.
    """

    NAME = "job grant"

    job_id: str
    grant_bytes: int
    model_digest: str | None
    numerics_tag: str
    lifetime_seconds: float
    jobs: int | None = None


@dataclass(frozen=True)
class Usage(JsonMessage):
    """Answer to ``GET /jobs/<id>``: resource use of a job that has ended.

    Attributes:
        kind: kind of the job.
        charged_account: account that pays.
        model_digest: sha256 of the package; None for ``index`` jobs.
        cut: 0 for ``index`` jobs.
        encoding: encoding of the features.
        samples: rows sent, including rows with an error.
        errors: rows sent with an error.
        device_seconds: seconds of the device, for rows sent or not.
        decode_seconds: seconds of the decoding threads, for rows sent or not.
        cpu_seconds: core-seconds of all stages.  On a CPU they include the
            device seconds times the threads of a pass.
        source_bytes: bytes read of the source.
        sent_bytes: bytes of the stream.
        outcome: ``done``, ``failed`` or ``gone`` (the reader disconnected).
        reason: code of the error if the job failed, else empty.
    """

    NAME = "usage"

    kind: Annotated[str, one_of(*KINDS)]
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
    outcome: Annotated[str, one_of(*OUTCOMES)]
    reason: PossiblyEmpty

    @classmethod
    def sum_of(cls, usages: Sequence[Usage]) -> Usage:
        """Resource use of all jobs of one request, and facts of the last."""
        sums = {
            name: sum(getattr(usage, name) for usage in usages)
            for name in _SUMMED
        }
        return replace(usages[-1], **sums)


_SUMMED = (
    "samples",
    "errors",
    "device_seconds",
    "decode_seconds",
    "cpu_seconds",
    "source_bytes",
    "sent_bytes",
)
