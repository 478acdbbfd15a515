"""Rows of the jobs of one request, merged in its order.

The rows of a window are held in memory until their turn comes: no job holds
its place at a worker while it waits for another job's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

from hapi_middleware.concurrency import LightQueue, Task, Timeout
from hapi_middleware.handlers.access_log import UsageQuery
from hapi_middleware.metrics import StreamReporter
from hapi_middleware.worker.feature_stream import WorkerStream
from hapi_protocol.errors import HapiError
from hapi_protocol.headers import CONTENT_TYPE_STREAM
from hapi_protocol.merged_stream import merge_summaries
from hapi_protocol.tee_stream import (
    BOTH,
    CACHE,
    CLIENT,
    END,
    bad_stream,
    whole_frames,
)


@dataclass(eq=False)
class JobRows:
    """The rows of one job, read as soon as they come.

    Args:
        stream: the job's stream; owned by this object.
        indices: positions of its rows in the request.
        reporter: that of the request.

    Attributes:
        worker: opaque name of the worker.
        summary: the message with the job's summary; known at its end.
        last: the end of an Arrow stream; known at its end.
    """

    stream: WorkerStream
    indices: Sequence[int]
    reporter: StreamReporter

    def __post_init__(self) -> None:
        self.worker = self.stream.worker
        self.summary = self.last = b""
        self._frames = LightQueue()
        self._task = Task(self._read)

    def head(self) -> bytes:
        """The schema; before the first row."""
        kind, data = self._next()
        if kind != BOTH:
            raise bad_stream("it has no schema")
        return data

    def next_row(self) -> bytes:
        """The next row, and facts that come before it."""
        facts = b""
        while True:
            kind, data = self._next()
            if kind == BOTH:
                return facts + data
            if kind != CLIENT:
                raise bad_stream("it has too few rows")
            facts += data

    def end(self) -> bytes:
        """Reads to the end; returns the remaining facts."""
        facts = b""
        is_summary = False
        while True:
            kind, data = self._next()
            if kind == END:
                return facts
            if kind == CACHE:
                is_summary = True
            elif kind == BOTH:
                self.last = data
            elif is_summary:
                self.summary = data
            else:
                facts += data

    def close(self) -> None:
        """Ends the job.  Idempotent."""
        self._task.cancel()
        self.stream.close()

    def _next(self) -> tuple[bytes, bytes]:
        frame = self._frames.get()
        if isinstance(frame, BaseException):
            raise frame
        kind, data = frame
        return kind, data

    def _read(self) -> None:
        self.reporter.adopt_thread()
        try:
            for frame in whole_frames(self.stream):
                self._frames.put(frame)
            self._frames.put(bad_stream("it ends too early"))
        except (Exception, Timeout) as error:
            self._frames.put(error)


def close_all(opened: Sequence[JobRows]) -> None:
    """Ends jobs, also if ending one of them fails."""
    with ExitStack() as stack:
        for stream in opened:
            stack.callback(stream.close)


class MergedStream(WorkerStream):
    """The rows of all jobs of a request, in its order.

    Args:
        first: the jobs of the first window, started.
        windows: starts the jobs of the other windows.
        reporter: reports the end.
        usage_query: gets the outcome.
        on_close: called at the end.
    """

    content_type = CONTENT_TYPE_STREAM

    def __init__(
        self,
        first: list[JobRows],
        windows: Iterator[list[JobRows]],
        reporter: JointReporter,
        usage_query: UsageQuery,
        on_close: Callable[[], None],
    ) -> None:
        self.worker = first[0].worker
        self._reporter = reporter
        self._usage_query = usage_query
        self._on_close = on_close
        self._open: list[JobRows] = first
        self._pieces = self._run(chain([first], windows))

    def _next(self) -> bytes | None:
        return next(self._pieces, None)

    def _end(self, outcome: str, error: HapiError | None) -> None:
        self._usage_query.ended(outcome, error, self.sent_bytes)
        with ExitStack() as stack:
            stack.callback(self._reporter.report, outcome, error)
            stack.callback(self._on_close)
            stack.callback(close_all, self._open)

    def _run(self, windows: Iterator[list[JobRows]]) -> Iterator[bytes]:
        summaries: list[bytes] = []
        last = b""
        for window in windows:
            self._open = window
            heads = [rows.head() for rows in window]
            if not summaries:
                yield heads[0]
            order = sorted(
                (index, number)
                for number, rows in enumerate(window)
                for index in rows.indices
            )
            for _, number in order:
                yield window[number].next_row()
            for rows in window:
                facts = rows.end()
                if facts:
                    yield facts
                summaries.append(rows.summary)
                last = rows.last
            # Workers do not keep it for as long as a request may last.
            self._usage_query.settle()
        yield merge_summaries(summaries)
        yield last


class JointReporter(StreamReporter):
    """Reports several streams as one.

    Args:
        reporter: reports the start of the first and the end of the last.
    """

    def __init__(self, reporter: StreamReporter) -> None:
        self._reporter = reporter
        self._source_bytes = self._sent_bytes = 0
        self._has_started = False

    def adopt_thread(self) -> None:
        """Names the request, as :meth:`.StreamReporter.adopt_thread`."""
        self._reporter.adopt_thread()

    def started(self) -> None:
        """Reports the start of the first stream."""
        if not self._has_started:
            self._has_started = True
            self._reporter.started()

    def ended(
        self,
        outcome: str,
        error: HapiError | None,
        source_bytes: int,
        sent_bytes: int,
    ) -> None:
        """Notes the end of a stream."""
        self._source_bytes += source_bytes
        self._sent_bytes += sent_bytes

    def report(self, outcome: str, error: HapiError | None) -> None:
        """Reports the end of all."""
        sizes = self._source_bytes, self._sent_bytes
        self._reporter.ended(outcome, error, *sizes)
