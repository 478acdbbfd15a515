"""Which samples a job's body holds, and which of them are wanted.

The body is one object, or many that the filter has framed
(:mod:`hapi_protocol.multi_object`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hapi_protocol.errors import UnsupportedError
from hapi_protocol.job_messages import JobRequest
from hapi_protocol.multi_object import ObjectEntry, iter_objects
from hapi_protocol.shards import (
    META_EXTENSION,
    SNIFF_BYTES,
    Limits,
    Medium,
    Readable,
    Sample,
    iter_samples,
    sniff,
)
from hapi_splitter.inputs.image_decode import SampleError
from hapi_worker.jobs.chunked_body import ChunkedBody

UNSUPPORTED = "unsupported_object"
_KINDS = {
    "tar": "a tar of samples, which is read by itself only",
    "jpeg": "a JPEG image",
    "png": "a PNG image",
    "npy": "a NumPy array (.npy)",
    None: "neither a JPEG or PNG image nor a NumPy array (.npy)",
}


@dataclass(frozen=True)
class Start:
    """The first bytes of a job's object.

    Attributes:
        kind: as of :func:`hapi_protocol.shards.sniff`.
    """

    data: bytes
    kind: str | None

    def num_samples(self, request: JobRequest) -> int | None:
        """Wanted, where that is known before they are read."""
        if request.num_objects is not None:
            return request.num_objects
        if self.kind != "tar":
            return 1
        if request.samples is None or request.samples.last is None:
            return None
        return request.samples.last - request.samples.first + 1


def read_start(body: Readable) -> Start:
    """Looks at the beginning of a body.

    Raises: as its ``read``.
    """
    data = _read_up_to(body, SNIFF_BYTES)
    return Start(data, sniff(data))


def read_samples(
    start: Start,
    body: ChunkedBody,
    request: JobRequest,
    *,
    medium: Medium | None,
    limits: Limits,
    max_samples: int,
) -> Iterator[Sample]:
    """The wanted samples, in shard order, as they arrive.

    The object is a tar or one image or array, told by its start.  Reading
    stops behind the last wanted sample; without one it goes to the
    end of the body, which must have its announced length.  Of many objects
    each one is a sample, and what is wrong with one is in its ``error``.

    Args:
        start: of the body.
        body: the rest of it.
        request: whose it is.
        medium: that the model takes; None for an index, of any.
        limits: bounds checked before allocation.
        max_samples: of the object.

    Raises:
        UnsupportedError: ``unsupported_object``, ``empty_shard``,
            ``damaged_shard``, ``limit_exceeded``, ``samples_out_of_range``.
    """
    if request.num_objects is not None:
        assert medium is not None, "many objects have no index"
        yield from _objects(start, body, request.num_objects, medium, limits)
        return
    num_seen = 0
    num_wanted = 0
    for sample in _all_samples(start, body, request, medium, limits):
        num_seen += 1
        if num_seen > max_samples:
            raise _unsupported(
                request,
                "limit_exceeded",
                f"it has more than {max_samples} samples",
            )
        if request.samples is None or sample.index in request.samples:
            num_wanted += 1
            yield sample
            if request.samples and sample.index == request.samples.last:
                return
    body.drain()
    if not num_seen:
        raise _unsupported(request, "empty_shard", "it has no sample")
    if not num_wanted:
        raise _unsupported(
            request,
            "samples_out_of_range",
            f"samples {request.samples} were asked for, and it has {num_seen}",
        )


def _all_samples(
    start: Start,
    body: ChunkedBody,
    request: JobRequest,
    medium: Medium | None,
    limits: Limits,
) -> Iterator[Sample]:
    if start.kind == "tar":
        ranged = request.ranged and request.samples is not None
        yield from iter_samples(
            _Rejoined(start.data, body),
            name=request.source_name,
            limits=limits,
            first_index=request.samples.first
            if ranged and request.samples
            else 0,
        )
    elif start.kind is None:
        raise _unsupported(
            request,
            UNSUPPORTED,
            f"it is no tar of samples, and {_KINDS[None]}",
        )
    elif medium is not None and start.kind not in medium.kinds:
        raise _unsupported(
            request, UNSUPPORTED, _taken_instead(start.kind, medium)
        )
    else:
        yield _single(start.kind, start.data, body, request, limits)


def _taken_instead(kind: str | None, medium: Medium) -> str:
    return f"it is {_KINDS[kind]}, and the model takes {medium.name}s"


def object_error(error: SampleError) -> str:
    """What is wrong with one of many objects: a code, and why."""
    return f"{UNSUPPORTED}: {error}"


def _objects(
    start: Start,
    body: ChunkedBody,
    num_objects: int,
    medium: Medium,
    limits: Limits,
) -> Iterator[Sample]:
    stream = _Rejoined(start.data, body)
    found = iter_objects(stream, num_objects, limits.max_member_bytes)
    for entry, data in found:
        yield _object_sample(entry, data, medium)
    body.drain()


def _object_sample(entry: ObjectEntry, data: bytes, medium: Medium) -> Sample:
    sample = Sample(entry.index, entry.key, 0, len(data), error=entry.error)
    sample.members[META_EXTENSION] = entry.meta().encode()
    if entry.error is not None:
        return sample
    kind = sniff(data[:SNIFF_BYTES])
    if not data:
        sample.error = f"{UNSUPPORTED}: it is empty"
    elif kind is None or kind == "tar":
        sample.error = f"{UNSUPPORTED}: it is {_KINDS[kind]}"
    elif kind not in medium.kinds:
        sample.error = f"{UNSUPPORTED}: {_taken_instead(kind, medium)}"
    else:
        sample.members[kind] = data
    return sample


def _single(
    kind: str,
    start: bytes,
    body: ChunkedBody,
    request: JobRequest,
    limits: Limits,
) -> Sample:
    length, limit = request.source_length_bytes, limits.max_member_bytes
    assert length is not None, "of one object"
    if length > limit:
        raise _unsupported(
            request,
            "limit_exceeded",
            f"it has {length} bytes; at most {limit}",
        )
    data = start + _read_up_to(body, length - len(start))
    base = request.source_name.rpartition("/")[2]
    return Sample(
        index=0,
        key=base.partition(".")[0] or base,
        offset=0,
        length=len(data),
        members={kind: data},
    )


def _read_up_to(stream: Readable, size: int) -> bytes:
    pieces = []
    while size > 0 and (piece := stream.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


class _Rejoined:
    """A stream with the bytes that were read to look at put back."""

    def __init__(self, start: bytes, rest: Readable) -> None:
        self._start = start
        self._rest = rest

    def read(self, size: int, /) -> bytes:
        if not self._start:
            return self._rest.read(size)
        piece, self._start = self._start[:size], self._start[size:]
        return piece


def _unsupported(
    request: JobRequest, code: str, what: str
) -> UnsupportedError:
    return UnsupportedError(
        code,
        f"object {request.source_name}: {what}",
        object_name=request.source_name,
    )
