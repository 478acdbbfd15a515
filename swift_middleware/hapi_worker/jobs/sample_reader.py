"""Reads the requested samples from a job's body.

The body is one object, or several that the filter has framed
(:mod:`hapi_protocol.multi_object`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hapi_protocol.errors import UnsupportedError
from hapi_protocol.job_messages import JobRequest
from hapi_protocol.multi_object import ObjectEntry, iter_objects
from hapi_protocol.sample_checks import check_samples
from hapi_protocol.samples import (
    IMAGE,
    META_EXTENSION,
    SNIFF_BYTES,
    Medium,
    Sample,
    SampleError,
    compression_message,
    sniff,
)
from hapi_protocol.shards import Limits, Readable, iter_samples
from hapi_worker.jobs.chunked_body import ChunkedBody

UNSUPPORTED = "unsupported_object"
_KINDS: dict[str | None, str] = {
    "tar": "a tar of samples, which must be requested alone",
    **{kind: f"a {kind.upper()} image" for kind in IMAGE.kinds},
    "npy": "a NumPy array (.npy)",
    "npz": "an archive of NumPy arrays (.npz)",
    None: "neither an image nor a NumPy array (.npy, .npz)",
}


@dataclass(frozen=True)
class BodyStart:
    """The first bytes of a job's object.

    Attributes:
        kind: the result of :func:`hapi_protocol.samples.sniff`.
    """

    data: bytes
    kind: str | None

    def num_samples(self, request: JobRequest) -> int | None:
        """Number of requested samples; None if it is not known yet."""
        if request.num_objects is not None:
            # However the objects are spread, batches have the same size.
            return request.request_objects or request.num_objects
        if self.kind != "tar":
            return 1
        if request.samples is None or request.samples.last is None:
            return None
        return request.samples.last - request.samples.first + 1


def read_start(body: Readable) -> BodyStart:
    """Reads the first bytes of a body; raises what its ``read`` raises."""
    data = _read_up_to(body, SNIFF_BYTES)
    return BodyStart(data, sniff(data))


@dataclass(frozen=True)
class SampleReader:
    """Reads the requested samples of a job's body.

    The object is a tar, or one image or array; its first bytes decide.
    Reading stops behind the last requested sample.  Without a last one, or
    if the features of a whole object may be cached, it goes to the end of the
    body, which must have the announced length.  If the body holds several
    objects, each is one sample, and its ``error`` says what is wrong with it.

    Args:
        start: the first bytes of the body.
        body: the rest of the body.
        request: the job's request.
        medium: the medium that the model takes; None for an index of any.
        limits: bounds that are checked before memory is allocated.
        max_samples: largest number of samples in the object.
    """

    start: BodyStart
    body: ChunkedBody
    request: JobRequest
    medium: Medium | None
    limits: Limits
    max_samples: int

    def samples(self) -> Iterator[Sample]:
        """Yields the samples in shard order, as they arrive.

        Raises:
            UnsupportedError: ``unsupported_object``, ``empty_shard``,
                ``damaged_shard``, ``limit_exceeded``,
                ``samples_out_of_range``.
            UnavailableError: ``source_damaged``.
        """
        request = self.request
        if request.num_objects is not None:
            assert self.medium is not None, "several objects have no index"
            yield from self._object_samples(request.num_objects, self.medium)
            return
        samples = self._requested()
        is_open = request.samples is None or request.samples.last is None
        if is_open or (request.is_split and not request.ranged):
            samples = _hold_last(samples, self.body.drain)
        yield from samples

    def _requested(self) -> Iterator[Sample]:
        num_read = 0
        num_requested = 0
        wanted = self.request.samples
        for sample in self._all_samples():
            num_read += 1
            if num_read > self.max_samples:
                raise self._unsupported(
                    "limit_exceeded",
                    f"it has more than {self.max_samples} samples",
                )
            if wanted is None or sample.index in wanted:
                num_requested += 1
                yield sample
                if wanted and sample.index == wanted.last:
                    return
        self.body.drain()
        if not num_read:
            raise self._unsupported("empty_shard", "it has no sample")
        if not num_requested:
            raise self._unsupported(
                "samples_out_of_range",
                f"samples {wanted} were asked for, and it has {num_read}",
            )

    def _all_samples(self) -> Iterator[Sample]:
        start, request, medium = self.start, self.request, self.medium
        # Only samples of a tar have checksums, whatever its damaged bytes say.
        if start.kind == "tar" or request.crc32s:
            first = request.samples.first if request.samples else 0
            samples = iter_samples(
                _WithStart(start.data, self.body),
                name=request.source_name,
                limits=self.limits,
                first_index=first if request.ranged else 0,
            )
            name = request.source_name
            yield from check_samples(samples, request.crc32s, name)
        elif start.kind is None:
            raise self._unsupported(
                UNSUPPORTED,
                compression_message(start.data)
                or f"it is not a tar of samples, and {_KINDS[None]}",
            )
        elif medium is not None and start.kind not in medium.kinds:
            reason = _wrong_medium(start.kind, medium)
            raise self._unsupported(UNSUPPORTED, reason)
        else:
            yield self._single((medium and medium.member) or start.kind)

    def _object_samples(
        self, num_objects: int, medium: Medium
    ) -> Iterator[Sample]:
        objects = iter_objects(
            _WithStart(self.start.data, self.body),
            num_objects,
            self.limits.max_member_bytes,
            is_part=self.request.is_merged,
        )
        for entry, data in objects:
            yield _object_sample(entry, data, medium)
        self.body.drain()

    def _single(self, member: str) -> Sample:
        length = self.request.source_length_bytes
        limit = self.limits.max_member_bytes
        assert length is not None, "the length of one object is known"
        if length > limit:
            raise self._unsupported(
                "limit_exceeded", f"it has {length} bytes; at most {limit}"
            )
        start = self.start.data
        data = start + _read_up_to(self.body, length - len(start))
        base = self.request.source_name.rpartition("/")[2]
        return Sample(
            index=0,
            key=base.partition(".")[0] or base,
            offset=0,
            length=len(data),
            members={member: data},
            crc32=zlib.crc32(data),
        )

    def _unsupported(self, code: str, reason: str) -> UnsupportedError:
        name = self.request.source_name
        return UnsupportedError(
            code, f"object {name}: {reason}", object_name=name
        )


def _hold_last(
    samples: Iterator[Sample], drain: Callable[[], None]
) -> Iterator[Sample]:
    """Yields the last sample after the body's end.

    The filter sends the end only of an object that has its ETag's digest.
    """
    held: Sample | None = None
    for sample in samples:
        if held is not None:
            yield held
        held = sample
    drain()
    if held is not None:
        yield held


def _wrong_medium(kind: str | None, medium: Medium) -> str:
    return f"it is {_KINDS[kind]}, and the model takes {medium.name}s"


def object_error(error: SampleError) -> str:
    """Error of one of several objects: the code, and the reason."""
    return f"{UNSUPPORTED}: {error}"


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
        sample.error = f"{UNSUPPORTED}: {_wrong_medium(kind, medium)}"
    else:
        sample.members[medium.member or kind] = data
    return sample


def _read_up_to(stream: Readable, size: int) -> bytes:
    pieces = []
    while size > 0 and (piece := stream.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


class _WithStart:
    """A stream with its first bytes, which were read already, put back."""

    def __init__(self, start: bytes, rest: Readable) -> None:
        self._start = start
        self._rest = rest

    def read(self, size: int, /) -> bytes:
        if not self._start:
            return self._rest.read(size)
        piece, self._start = self._start[:size], self._start[size:]
        return piece
