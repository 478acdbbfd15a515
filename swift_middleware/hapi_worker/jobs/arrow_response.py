"""Response of a job: Arrow messages, cut into pieces for the socket."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from hapi_protocol.errors import HapiError
from hapi_protocol.feature_stream import Row
from hapi_protocol.feature_writer import FeatureStreamWriter
from hapi_protocol.headers import CONTENT_TYPE_STREAM
from hapi_protocol.job_messages import (
    OUTCOME_DONE,
    OUTCOME_FAILED,
    OUTCOME_GONE,
    JobRequest,
)
from hapi_protocol.summary import WorkerLoad
from hapi_protocol.tee_stream import BOTH, CONTENT_TYPE_TEE, end_frame, frame
from hapi_splitter.encodings import EncodedFeatures
from hapi_worker.execution.batch_items import MicroBatch
from hapi_worker.jobs.pipeline import Pipeline
from hapi_worker.monitoring.accounting import JobTotals
from hapi_worker.monitoring.metrics import Metrics
from hapi_worker.peer import ClientDisconnectedError

PIECE_BYTES = 128 * 1024
"""Size of a piece; the server copies the rest after each partial write."""

logger = logging.getLogger(__name__)


class BrokenStreamError(ConnectionAbortedError):
    """Makes the server close the connection without a last chunk."""


@dataclass(eq=False)
class JobStream:
    """A WSGI body: the job's feature stream, or its index stream.

    A failure is logged, counted, and breaks the connection, so that a client
    never takes half a stream for a complete one.

    Args:
        load: returns the worker's load, for the summary.
        on_end: called once, when all stages have stopped, with outcome and
            reason (see ``Usage``) and the job's totals.
    """

    request: JobRequest
    pipeline: Pipeline
    schema: object
    metrics: Metrics
    load: Callable[[], WorkerLoad]
    on_end: Callable[[str, str, JobTotals], None]

    def __post_init__(self) -> None:
        self._pieces: list[bytes] = []
        self._saturated = 0
        self._cpu_seconds = 0.0
        self._started_cpu = time.thread_time()
        self._totals = JobTotals()
        self._sent_bytes = 0
        self._piece_since: float | None = None
        self._outcome = (OUTCOME_GONE, "")
        self._closed = False
        sink = _Appender(self._pieces)
        is_framed = self.request.is_split or self.request.is_merged
        self._framed = _FramedSink(sink) if is_framed else None
        self._writer = (
            FeatureStreamWriter(
                self._framed,
                self.schema,
                self._framed.mark,
                is_merged=self.request.is_merged,
            )
            if self._framed
            else FeatureStreamWriter(sink, self.schema)
        )
        if self._framed:
            self._framed.flush()
        self._output = self._run()

    @property
    def content_type(self) -> str:
        return CONTENT_TYPE_TEE if self._framed else CONTENT_TYPE_STREAM

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        return next(self._output)

    def close(self) -> None:
        """Ends the job; the server calls it after success and failure."""
        if self._closed:
            return
        self._closed = True
        try:
            self._output.close()
            self.pipeline.cancel()
            failure = self.pipeline.queue.failure
            if self._outcome[0] == OUTCOME_GONE and isinstance(
                failure, HapiError
            ):
                # The worker has broken the connection off, maybe before the
                # first piece.
                self._outcome = (OUTCOME_FAILED, failure.code)
            self._report()
        finally:
            self.on_end(*self._outcome, self._final_totals())

    def _final_totals(self) -> JobTotals:
        return replace(
            self._totals,
            sent_bytes=self._sent_bytes,
            source_bytes=self.pipeline.body.bytes_read,
            cpu_seconds=self._own_cpu(),
        )

    def _own_cpu(self) -> float:
        """CPU seconds of the reader and of this thread, which also sends."""
        own = time.thread_time() - self._started_cpu
        return self.pipeline.queue.read_cpu + own

    def blocked_seconds(self) -> float:
        """Time for which the client has been taking the present piece."""
        since = self._piece_since
        return 0.0 if since is None else time.monotonic() - since

    def stalled(self) -> None:
        """Records that the client took nothing for too long."""
        self._outcome = ("failed", "too_slow")

    def _report(self) -> None:
        outcome, reason = self._outcome
        kind = self.request.kind
        self.metrics.jobs.labels(kind, outcome, reason).inc()
        self.metrics.received_bytes.inc(self.pipeline.body.bytes_read)
        logger.info(
            "job %s of %s: %s%s, %d rows, %d errors, %d bytes in (%s)",
            kind,
            self.request.source_name,
            outcome,
            f" ({reason})" if reason else "",
            self._writer.num_rows,
            self._writer.num_errors,
            self.pipeline.body.bytes_read,
            self.request.trans_id,
        )

    def _run(self) -> Generator[bytes, None, None]:
        try:
            yield from self._all_pieces()
        except HapiError as error:
            self._outcome = (OUTCOME_FAILED, error.code)
            logger.warning("%s (%s)", error, self.request.trans_id)
            raise _broken() from error
        except ClientDisconnectedError as error:
            raise _broken() from error
        except Exception as error:
            self._outcome = (OUTCOME_FAILED, "internal")
            logger.exception(
                "a defect: a stream failed (%s)", self.request.trans_id
            )
            raise _broken() from error
        self._outcome = (OUTCOME_DONE, "")

    def _all_pieces(self) -> Iterator[bytes]:
        blocked = 0.0
        # The server takes and sends all pieces in one thread.
        self._started_cpu = time.thread_time()
        for batch in self.pipeline.batches():
            batch.timings["send_blocked"] = blocked
            self._write(batch)
            started = time.monotonic()
            yield from self._take_pieces()
            blocked = time.monotonic() - started
            self._totals = JobTotals(
                self._writer.num_rows, self._writer.num_errors
            )
        self._writer.close(
            source_etag=self.request.source_etag,
            source_bytes=self.pipeline.body.bytes_read,
            saturated=self._saturated,
            cpu_seconds=self._cpu_seconds + self._own_cpu(),
            load=self.load(),
        )
        if self._framed:
            self._framed.end(self._writer.num_errors)
        yield from self._take_pieces()

    def _write(self, batch: MicroBatch) -> None:
        started, started_cpu = time.monotonic(), time.thread_time()
        timings = batch.timings
        encode_cpu = timings.pop("encode_cpu", 0.0)
        self._cpu_seconds += (
            encode_cpu
            + timings.get("decode_cpu", 0.0)
            + timings.get("forward_cpu", 0.0)
        )
        encoded = None
        if batch.encoded is not None:
            encoded = batch.encoded
            self._saturated += encoded.saturated
            self.metrics.saturated.inc(encoded.saturated)
        spent = timings.pop("encode", 0.0)
        parts = [(batch.rows, encoded)]
        if self.request.is_merged:
            parts = list(_single_rows(batch.rows, encoded))
        for number, (rows, part) in enumerate(parts, 1):
            seconds = {
                **timings,
                "encode": spent + time.monotonic() - started,
                "encode_cpu": encode_cpu + time.thread_time() - started_cpu,
            }
            self._writer.write(
                rows,
                None if part is None else part.array,
                seconds if number == len(parts) else None,
                scale=None if part is None else part.scale,
                zero=None if part is None else part.zero,
            )
            if self.request.is_merged and self._framed:
                self._framed.flush()
        self._count(batch)

    def _count(self, batch: MicroBatch) -> None:
        metrics = self.metrics
        metrics.samples.inc(len(batch.rows))
        metrics.sample_errors.inc(sum(r.error is not None for r in batch.rows))
        for stage, seconds in batch.timings.items():
            metrics.stage_seconds.labels(stage).observe(seconds)

    def _take_pieces(self) -> Iterator[bytes]:
        if self._framed:
            self._framed.flush()
        whole = b"".join(self._pieces)
        self._pieces.clear()
        for start in range(0, len(whole), PIECE_BYTES):
            piece = whole[start : start + PIECE_BYTES]
            self._piece_since = time.monotonic()
            yield piece
            self._piece_since = None
            self._sent_bytes += len(piece)
            self.metrics.sent_bytes.inc(len(piece))


def _single_rows(
    rows: Sequence[Row], encoded: EncodedFeatures | None
) -> Iterator[tuple[list[Row], EncodedFeatures | None]]:
    """Yields each row with its own features."""
    number = 0
    for row in rows:
        if row.error is not None or encoded is None:
            yield [row], None
            continue
        one = slice(number, number + 1)
        number += 1
        yield (
            [row],
            replace(
                encoded,
                array=encoded.array[one],
                scale=None if encoded.scale is None else encoded.scale[one],
                zero=None if encoded.zero is None else encoded.zero[one],
            ),
        )


class _Appender:
    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def write(self, data: bytes) -> None:
        self._pieces.append(data)


class _FramedSink:
    """A sink that puts the bytes between two marks into one frame."""

    def __init__(self, sink: _Appender) -> None:
        self._sink = sink
        self._kind = BOTH
        self._waiting: list[bytes] = []

    def mark(self, kind: bytes) -> None:
        """Sets the kind of the bytes that follow."""
        if kind != self._kind:
            self.flush()
            self._kind = kind

    def write(self, data: bytes) -> None:
        self._waiting.append(data)

    def flush(self) -> None:
        data = b"".join(self._waiting)
        self._waiting.clear()
        if data:
            self._sink.write(frame(self._kind, data))

    def end(self, errors: int) -> None:
        self.flush()
        self._sink.write(end_frame(errors))


def _broken() -> BrokenStreamError:
    return BrokenStreamError(errno.ECONNABORTED, "the stream was broken off")
