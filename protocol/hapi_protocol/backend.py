"""Requests of a proxy's filter to the filter of an object server.

``HAPI /device/partition/account/container/object`` is one exchange.  Its body
(chunked) is a signed message, and in some steps the bytes of a source or a
package.  The answer is 200 at once, then the frames of
:mod:`hapi_protocol.frames`.

========  =====================  =================  =========================
step      message                bytes after it     ``ANSWER`` has
========  =====================  =================  =========================
job       :class:`JobOrder`      none: the filter   :class:`StreamStart`;
                                 reads the object   then ``DATA``
bytes     :class:`JobOrder`      of the source      as above
objects   :class:`ObjectsOrder`  none: as ``job``   as above
find      ``ModelIdentity``      none               :class:`ModelFacts`
model     ``ModelIdentity``      the package        nothing
profile   ``ProfileRequest``     none               ``ModelProfile``
usage     :class:`JobId`         none               ``Usage``
status    :class:`StatusQuery`   none               :class:`WorkerStatus`
========  =====================  =================  =========================

``READY`` comes when the bytes may be sent; in the first three steps it has
the ``JobGrant``.
"""

from __future__ import annotations

from dataclasses import dataclass

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

BACKEND_VERSION = 2
"""2 signs the address of the object server."""
HEADER_ADDRESS = "X-Backend-Hapi-Address"
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
STEP_OBJECTS = "objects"
STEP_FIND = "find"
STEP_MODEL = "model"
STEP_PROFILE = "profile"
STEP_USAGE = "usage"
STEP_STATUS = "status"
STEPS = (
    STEP_JOB,
    STEP_BYTES,
    STEP_OBJECTS,
    STEP_FIND,
    STEP_MODEL,
    STEP_PROFILE,
    STEP_USAGE,
    STEP_STATUS,
)


@dataclass(frozen=True)
class JobOrder(JsonMessage):
    """Message of the steps ``job`` and ``bytes``.

    Attributes:
        job: the authorised job.
        etag: ETag of the object that the path names; empty if the bytes are
            in the request.  It is that of the job's source, or of a segment.
        part: bytes of that object to read; None for all.
    """

    NAME = "job order"

    job: JobRequest
    etag: PossiblyEmpty = ""
    part: ByteRange | None = None

    def check(self) -> None:
        """Raises FieldError if the fields contradict each other."""
        self.job.check()
        if self.part is not None and self.part.length_bytes < 1:
            raise FieldError("part", str(self.part))


@dataclass(frozen=True)
class StoredObject:
    """One of many objects, which an object server reads.

    Attributes:
        index: zero-based position in the client's request.
        key: the object's name.
        etag: its ETag.
        length_bytes: its length.
        device: the device that has it.
        partition: its partition.
    """

    index: int
    key: str
    etag: str
    length_bytes: int
    device: str
    partition: int


@dataclass(frozen=True)
class ObjectsOrder(JsonMessage):
    """Message of the step ``objects``.

    Attributes:
        job: the authorised job; its source is the container.
        objects: the objects, in the order of the client's request.
    """

    NAME = "order of objects"

    job: JobRequest
    objects: tuple[StoredObject, ...]

    def check(self) -> None:
        """Raises FieldError if the fields contradict each other."""
        self.job.check()
        if self.job.num_objects != len(self.objects):
            raise FieldError("objects", len(self.objects))


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
class StatusQuery(JsonMessage):
    """Message of the step ``status``; it has no fields."""

    NAME = "status query"


@dataclass(frozen=True)
class WorkerStatus(JsonMessage):
    """Answer to ``status``.

    Attributes:
        worker: opaque name of the worker.
        state: ``ok``, ``draining``, or ``degraded``: it has just tried to
            take a package, and cannot.
        problem: why it is degraded.
        release: release of the worker.
        devices: names of the devices in service.
        jobs_running: jobs that hold a stream.
        jobs_waiting: jobs that wait for one.
    """

    NAME = "status of a worker"

    worker: PossiblyEmpty
    state: str
    problem: PossiblyEmpty
    release: str
    devices: tuple[str, ...]
    jobs_running: int
    jobs_waiting: int


@dataclass(frozen=True)
class StreamStart(JsonMessage):
    """Answer to a job: its first features exist.

    Attributes:
        content_type: content type of the worker's answer.
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
