"""Spreads many objects over the object servers that have them.

The objects of a request are taken in windows.  In each, one job goes to each
object server that is the first choice for some of them; the rest (unreadable,
not plain, alone on their server, or of one that refuses) are read by the proxy
and sent to a place that computes.  The rows of a window are held in memory
until their turn comes: no job holds its place at a worker while it waits for
another job's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

from hapi_middleware.concurrency import (
    LightQueue,
    Task,
    Timeout,
    map_ahead,
    sleep,
)
from hapi_middleware.handlers.access_log import UsageQuery
from hapi_middleware.metrics import (
    OUTCOME_BROKEN,
    OUTCOME_DONE,
    OUTCOME_GONE,
    StreamEnd,
    StreamReporter,
)
from hapi_middleware.places.computer import Granted, Work
from hapi_middleware.places.node_client import Node
from hapi_middleware.places.places import ELSEWHERE, Computers, Places
from hapi_middleware.requests.multi_object_reads import (
    FramedObjects,
    ObjectReader,
)
from hapi_middleware.requests.subrequests import ObjectHead, Package
from hapi_middleware.worker.feature_stream import WorkerStream
from hapi_protocol.backend import StoredObject
from hapi_protocol.errors import HapiError
from hapi_protocol.headers import CONTENT_TYPE_STREAM
from hapi_protocol.job_messages import JobRequest
from hapi_protocol.merged_stream import (
    bad_stream,
    merge_summaries,
    whole_frames,
)
from hapi_protocol.tee_stream import BOTH, CACHE, CLIENT, END

WINDOW = 64
"""Objects of which the headers are read before their jobs begin, and of which
the features are held in memory."""
MAX_GROUPS = 8
"""Object servers that have jobs of one window.  With more, each would compute
batches of a few samples, and need the package."""
START_ATTEMPTS = 3
"""Attempts to start a later window, when the answer has begun."""
MAX_STORED_BYTES = 48 * 1024
"""Names in one message; there may be 64 KiB in all."""
_OBJECT_BYTES = 300
"""An object in a message without its name, at most."""

Numbered = tuple[int, str]
"""Index in the request, and name."""


@dataclass
class Group:
    """Objects of one job.

    Attributes:
        node: object server that reads them; None if the proxy does.
        numbered: the objects.
        stored: the same objects, as the object server finds them.
        num_bytes: length of ``stored`` in a message, at most.
    """

    node: Node | None
    numbered: list[Numbered] = field(default_factory=list)
    stored: list[StoredObject] = field(default_factory=list)
    num_bytes: int = 0

    def take(self, numbered: Numbered, head: ObjectHead, node: Node) -> bool:
        """Adds an object of the object server; False if it is full."""
        assert head.length_bytes is not None, "it has a node"
        self.num_bytes += _OBJECT_BYTES + len(json.dumps(numbered[1]))
        if self.num_bytes > MAX_STORED_BYTES:
            return False
        self.numbered.append(numbered)
        self.stored.append(
            StoredObject(
                *numbered,
                head.etag,
                head.length_bytes,
                str(node.facts["device"]),
                node.partition,
            )
        )
        return True


@dataclass(frozen=True)
class Window:
    """Some objects of a request, and what the caller may know of them.

    Attributes:
        heads: None for an object that the caller cannot read now.
    """

    numbered: Sequence[Numbered]
    heads: Sequence[ObjectHead | None]

    @property
    def is_readable(self) -> bool:
        """The caller can read one of the objects."""
        return any(self.heads)


class FanOut:
    """The jobs of one request for many objects.

    Args:
        places: places that compute.
        computers: those that are sent objects which the proxy reads.
        reader: reads objects with the caller's rights.
        job: the job, of all objects.
        package: the model.
        names: names of the objects.
        concurrency: number of objects that the proxy reads at a time.
        max_object_bytes: maximum length of one object.
        usage_query: gets each job.
        reporter: reports the start and the end of all jobs together.
    """

    def __init__(
        self,
        places: Places,
        computers: Computers,
        reader: ObjectReader,
        job: JobRequest,
        package: Package,
        names: Sequence[str],
        *,
        concurrency: int,
        max_object_bytes: int,
        usage_query: UsageQuery,
        reporter: StreamReporter,
    ) -> None:
        self._places = places
        self._computers = computers
        self._reader = reader
        self._job = job
        self._package = package
        self._concurrency = concurrency
        self._max_object_bytes = max_object_bytes
        self._usage_query = usage_query
        self._reporter = JointReporter(reporter)
        self._is_near = True
        numbered = iter(list(enumerate(names)))
        windows = iter(lambda: list(islice(numbered, WINDOW)), [])
        self._ahead = map_ahead(self._look_at, windows, 2)
        self._windows: Iterator[Window] = self._ahead

    def find_readable(self) -> bool:
        """Reads headers up to the first readable object; False if none is.

        Unreadable objects must not take a slot of a worker.
        """
        seen = []
        for window in self._ahead:
            seen.append(window)
            if window.is_readable:
                self._windows = chain(seen, self._ahead)
                return True
        return False

    def start(self) -> MergedStream:
        """Starts the first jobs and waits for their features."""
        first = self._start(next(self._windows))
        windows = (self._start_later(each) for each in self._windows)
        return MergedStream(
            first, windows, self._reporter, self._usage_query, self.close
        )

    def close(self) -> None:
        """Ends the reading of headers.  Idempotent."""
        self._ahead.close()

    def _look_at(self, numbered: list[Numbered]) -> Window:
        if not self._is_near:
            return Window(numbered, [None] * len(numbered))
        heads = map_ahead(self._reader.head, numbered, self._concurrency)
        return Window(numbered, list(heads))

    def _groups(self, window: Window) -> list[Group]:
        """The jobs of a window; if all are the proxy's, so are later ones."""
        candidates = [
            self._nodes(name, head)
            for (_, name), head in zip(
                window.numbered, window.heads, strict=True
            )
        ]
        counts = Counter(each[0].address for each in candidates if each)
        chosen = {address for address, _ in counts.most_common(MAX_GROUPS)}
        groups: dict[Any, Group] = {}
        others = Group(None)
        for numbered, head, nodes in zip(
            window.numbered, window.heads, candidates, strict=True
        ):
            near = [each for each in nodes if each.address in chosen]
            if near and head is not None:
                node = near[0]
                key = node.address, node.policy_index
                group = groups.setdefault(key, Group(node))
                if group.take(numbered, head, node):
                    continue
            others.numbered.append(numbered)
        self._is_near = bool(groups)
        return [*groups.values(), *([others] if others.numbered else [])]

    def _nodes(self, name: str, head: ObjectHead | None) -> list[Node]:
        """Object servers that may read an object, first choice first."""
        if (
            head is None
            or not head.length_bytes
            or head.length_bytes > self._max_object_bytes
        ):
            return []
        return self._places.nearest(f"{self._job.source_name}/{name}", head)

    def _start(self, window: Window) -> list[Rows]:
        """Starts the jobs of a window side by side."""
        groups = self._groups(window)
        concurrency = max(1, self._concurrency // len(groups))
        started: list[Rows] = []

        def start(group: Group) -> None:
            self._reporter.adopt_thread()
            indices = [index for index, _ in group.numbered]
            stream = self._stream(group, concurrency)
            started.append(Rows(stream, indices, self._reporter))

        try:
            for _ in map_ahead(start, groups, len(groups)):
                pass
        except BaseException:
            close_all(started)
            raise
        return started

    def _start_later(self, window: Window) -> list[Rows]:
        """Starts a window whose answer has begun, if need be later."""
        for _ in range(START_ATTEMPTS - 1):
            try:
                return self._start(window)
            except HapiError as error:
                if error.retry_after is None:
                    raise
                sleep(error.retry_after)
        return self._start(window)

    def _stream(self, group: Group, concurrency: int) -> WorkerStream:
        if group.node is not None:
            storing = self._places.storing_many(group.node, group.stored)
            try:
                return self._begin(storing, group, concurrency)
            except HapiError as error:
                if error.code not in ELSEWHERE:
                    raise
        return self._begin(self._computers, group, concurrency)

    def _begin(
        self, computers: Computers, group: Group, concurrency: int
    ) -> WorkerStream:
        job = replace(
            self._job,
            num_objects=len(group.numbered),
            request_objects=self._job.num_objects,
        )

        def is_answered(granted: Granted) -> bool:
            self._usage_query.add(granted)
            return False

        work = Work(
            job,
            lambda: FramedObjects(
                self._reader.read, group.numbered, concurrency
            ),
            is_repeatable=True,
            package=self._package,
            reporter=self._reporter,
        )
        stream = computers.start(work, is_answered)
        assert stream is not None, "is_answered() is never True"
        return stream


class Rows:
    """The rows of one job, read as soon as they come.

    Args:
        stream: the job's stream; owned by this object.
        indices: positions of its rows in the request.
        reporter: that of the request.

    Attributes:
        indices: as given.
        worker: opaque name of the worker.
        summary: the message with the job's summary; known at its end.
        last: the end of an Arrow stream; known at its end.
    """

    def __init__(
        self,
        stream: WorkerStream,
        indices: Sequence[int],
        reporter: StreamReporter,
    ) -> None:
        self.indices = indices
        self.worker = stream.worker
        self.summary = self.last = b""
        self._stream = stream
        self._reporter = reporter
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
        self._stream.close()

    def _next(self) -> tuple[bytes, bytes]:
        found = self._frames.get()
        if isinstance(found, BaseException):
            raise found
        kind, data = found
        return kind, data

    def _read(self) -> None:
        self._reporter.adopt_thread()
        try:
            for each in whole_frames(self._stream):
                self._frames.put(each)
            self._frames.put(bad_stream("it ends too early"))
        except (Exception, Timeout) as error:
            self._frames.put(error)


def close_all(opened: Sequence[Rows]) -> None:
    """Ends jobs, also if ending one of them fails."""
    with ExitStack() as stack:
        for each in opened:
            stack.callback(each.close)


class MergedStream:
    """The rows of all jobs of a request, in its order.

    Args:
        first: the jobs of the first window, started.
        windows: starts the jobs of the other windows.
        reporter: reports the end.
        usage_query: gets the outcome.
        on_close: called at the end.

    Attributes:
        worker: opaque name of one of the workers.
        content_type: that of a feature stream.
        is_closed: True after the end, a failure or :meth:`close`.
    """

    def __init__(
        self,
        first: list[Rows],
        windows: Iterator[list[Rows]],
        reporter: JointReporter,
        usage_query: UsageQuery,
        on_close: Callable[[], None],
    ) -> None:
        self.worker = first[0].worker
        self.content_type = CONTENT_TYPE_STREAM
        self.is_closed = False
        self._reporter = reporter
        self._usage_query = usage_query
        self._on_close = on_close
        self._open: list[Rows] = first
        self._sent_bytes = 0
        self._pieces = self._run(chain([first], windows))

    def __iter__(self) -> MergedStream:
        return self

    def __next__(self) -> bytes:
        try:
            piece = next(self._pieces)
            self._sent_bytes += len(piece)
            return piece
        except StopIteration:
            self._end(OUTCOME_DONE, None)
            raise
        except HapiError as error:
            raise self.fail(error) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all jobs.  Idempotent."""
        self._end(OUTCOME_GONE, None)

    def fail(self, error: HapiError) -> HapiError:
        """Ends the stream as broken by ``error``, and returns the error."""
        self._end(OUTCOME_BROKEN, error)
        return error

    def _end(self, outcome: str, error: HapiError | None) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._usage_query.ended(outcome, error, self._sent_bytes)
        with ExitStack() as stack:
            stack.callback(self._reporter.report, outcome, error)
            stack.callback(self._on_close)
            stack.callback(close_all, self._open)

    def _run(self, windows: Iterator[list[Rows]]) -> Iterator[bytes]:
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
        self._ends: list[StreamEnd] = []
        self._has_started = False

    def adopt_thread(self) -> None:
        """Names the request, as :meth:`.StreamReporter.adopt_thread`."""
        self._reporter.adopt_thread()

    def started(self) -> None:
        """Reports the start of the first stream."""
        if not self._has_started:
            self._has_started = True
            self._reporter.started()

    def ended(self, end: StreamEnd) -> None:
        """Notes the end of a stream."""
        self._ends.append(end)

    def report(self, outcome: str, error: HapiError | None) -> None:
        """Reports the end of all."""
        self._reporter.ended(
            StreamEnd(
                outcome,
                error,
                sum(each.source_bytes for each in self._ends),
                sum(each.sent_bytes for each in self._ends),
            )
        )
