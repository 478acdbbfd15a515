"""Requests of a proxy's filter to the filter of an object server.

``HAPI /device/partition/account/container/object`` is one exchange.  Its body
(chunked) is a signed message, and in some steps the bytes of a source or a
package.  The answer is 200 at once, then the frames of
:mod:`hapi_protocol.frames`.

========  ===================  ==================  ==========================
step      message              bytes after it      ``ANSWER`` has
========  ===================  ==================  ==========================
job       :class:`JobOrder`    none: the filter    :class:`StreamStart`; then
                               reads the object    ``DATA``
bytes     :class:`JobOrder`    of the source       as above
find      ``ModelIdentity``    none                :class:`ModelFacts`
model     ``ModelIdentity``    the package         nothing
profile   ``ProfileRequest``   none                ``ModelProfile``
usage     :class:`JobId`       none                ``Usage``
========  ===================  ==================  ==========================

``READY`` comes when the bytes may be sent; in the first two steps it has the
``JobGrant``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hapi_protocol.headers import ByteRange
from hapi_protocol.job_messages import JobRequest, ModelIdentity
from hapi_protocol.json_messages import (
    FieldError,
    JsonMessage,
    PossiblyEmpty,
)

METHOD = "HAPI"
"""A verb of its own: an object server without the filter answers 405.  It
would take a POST for a change of the object's metadata."""

BACKEND_VERSION = 1
HEADER_STEP = "X-Backend-Hapi-Step"
HEADER_VERSION = "X-Backend-Hapi-Version"
HEADER_SIGNATURE = "X-Backend-Hapi-Signature"
HEADER_NONCE = "X-Backend-Hapi-Nonce"
HEADER_MESSAGE_BYTES = "X-Backend-Hapi-Message-Bytes"
HEADER_POLICY = "X-Backend-Storage-Policy-Index"
HEADER_TIMESTAMP = "X-Timestamp"
"""The last two are Swift's own."""

STEP_JOB = "job"
STEP_BYTES = "bytes"
STEP_FIND = "find"
STEP_MODEL = "model"
STEP_PROFILE = "profile"
STEP_USAGE = "usage"
STEPS = (
    STEP_JOB,
    STEP_BYTES,
    STEP_FIND,
    STEP_MODEL,
    STEP_PROFILE,
    STEP_USAGE,
)


@dataclass(frozen=True)
class JobOrder(JsonMessage):
    """Message of the steps ``job`` and ``bytes``.

    Attributes:
        job: the authorised job.
        part: bytes of the object to read; None for all, or if the bytes are
            in the request.
    """

    NAME = "job order"

    job: JobRequest
    part: ByteRange | None

    @staticmethod
    def nested_json(value: Any) -> Any:
        """JSON form of the job, and of what is in it."""
        return JobRequest.nested_json(value)

    def check(self) -> None:
        """Raises FieldError if the fields contradict each other."""
        self.job.check()
        if self.part is not None and self.part.length_bytes < 1:
            raise FieldError("part", str(self.part))


@dataclass(frozen=True)
class ModelOrder(JsonMessage):
    """Message of the steps ``find`` and ``model``."""

    NAME = "model order"

    model: ModelIdentity


@dataclass(frozen=True)
class JobId(JsonMessage):
    """Message of the step ``usage``."""

    NAME = "job id"

    job_id: str


@dataclass(frozen=True)
class StreamStart(JsonMessage):
    """Answer to a job: its first features exist.

    Attributes:
        content_type: of the worker's answer.
        worker: opaque name of the worker.
    """

    NAME = "start of a stream"

    content_type: PossiblyEmpty
    worker: PossiblyEmpty


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model that the worker has hashed."""

    digest: str
    num_cuts: int
    numerics_tag: str


@dataclass(frozen=True)
class ModelFacts(JsonMessage):
    """Answer to ``find``.

    Attributes:
        model: None if the worker does not have it.
    """

    NAME = "facts of a model"

    model: ModelInfo | None
