"""Spreads many objects over the object servers that have them.

The objects of a request are taken in windows.  In each, one job goes to each
object server that is the first choice for some of them; the rest (unreadable,
not plain, on servers with too few of them, or on one that refuses) are read by
the proxy and sent to a place that computes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from itertools import chain, islice
from typing import Any

from hapi_middleware.concurrency import map_ahead, sleep
from hapi_middleware.handlers.access_log import UsageQuery
from hapi_middleware.handlers.merged_rows import (
    JobRows,
    JointReporter,
    MergedStream,
    close_all,
)
from hapi_middleware.metrics import StreamReporter
from hapi_middleware.places.computer import ELSEWHERE, AuthorisedJob
from hapi_middleware.places.node_faults import Node
from hapi_middleware.places.places import Computers, Places
from hapi_middleware.requests.multi_object_reads import (
    FramedObjects,
    ObjectReader,
)
from hapi_middleware.requests.package import Package
from hapi_middleware.requests.subrequests import ObjectHead
from hapi_middleware.worker.feature_stream import WorkerStream
from hapi_protocol.backend import StoredObject
from hapi_protocol.errors import HapiError
from hapi_protocol.job_messages import JobRequest

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
class ObjectGroup:
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


@dataclass(eq=False)
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

    places: Places
    computers: Computers
    reader: ObjectReader
    job: JobRequest
    package: Package
    names: InitVar[Sequence[str]]
    _: KW_ONLY
    concurrency: int
    max_object_bytes: int
    usage_query: UsageQuery
    reporter: InitVar[StreamReporter]

    def __post_init__(
        self, names: Sequence[str], reporter: StreamReporter
    ) -> None:
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
        windows = (self._start_later(window) for window in self._windows)
        return MergedStream(
            first, windows, self._reporter, self.usage_query, self.close
        )

    def close(self) -> None:
        """Ends the reading of headers.  Idempotent."""
        self._ahead.close()

    def _look_at(self, numbered: list[Numbered]) -> Window:
        if not self._is_near:
            return Window(numbered, [None] * len(numbered))
        heads = map_ahead(self.reader.head, numbered, self.concurrency)
        return Window(numbered, list(heads))

    def _groups(self, window: Window) -> list[ObjectGroup]:
        """The jobs of a window; if all are the proxy's, so are later ones."""
        candidates = [
            self._nodes(name, head)
            for (_, name), head in zip(
                window.numbered, window.heads, strict=True
            )
        ]
        counts = Counter(nodes[0].address for nodes in candidates if nodes)
        chosen = {address for address, _ in counts.most_common(MAX_GROUPS)}
        groups: dict[Any, ObjectGroup] = {}
        others = ObjectGroup(None)
        for numbered, head, nodes in zip(
            window.numbered, window.heads, candidates, strict=True
        ):
            near = [holder for holder in nodes if holder.address in chosen]
            if near and head is not None:
                node = near[0]
                key = node.address, node.policy_index
                group = groups.setdefault(key, ObjectGroup(node))
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
            or head.length_bytes > self.max_object_bytes
        ):
            return []
        return self.places.nearest(f"{self.job.source_name}/{name}", head)

    def _start(self, window: Window) -> list[JobRows]:
        """Starts the jobs of a window side by side."""
        groups = self._groups(window)
        concurrency = max(1, self.concurrency // len(groups))
        started: list[JobRows] = []

        def start(group: ObjectGroup) -> None:
            self._reporter.adopt_thread()
            indices = [index for index, _ in group.numbered]
            stream = self._stream(group, concurrency)
            started.append(JobRows(stream, indices, self._reporter))

        try:
            for _ in map_ahead(start, groups, len(groups)):
                pass
        except BaseException:
            close_all(started)
            raise
        return started

    def _start_later(self, window: Window) -> list[JobRows]:
        """Starts a window whose answer has begun, if need be later."""
        for _ in range(START_ATTEMPTS - 1):
            try:
                return self._start(window)
            except HapiError as error:
                if error.retry_after is None:
                    raise
                sleep(error.retry_after)
        return self._start(window)

    def _stream(self, group: ObjectGroup, concurrency: int) -> WorkerStream:
        if group.node is not None:
            storing = self.places.storing_many(group.node, group.stored)
            try:
                return self._begin(storing, group, concurrency)
            except HapiError as error:
                if error.code not in ELSEWHERE:
                    raise
        return self._begin(self.computers, group, concurrency)

    def _begin(
        self, computers: Computers, group: ObjectGroup, concurrency: int
    ) -> WorkerStream:
        job = replace(
            self.job,
            num_objects=len(group.numbered),
            request_objects=self.job.num_objects,
        )

        work = AuthorisedJob(
            job,
            lambda: FramedObjects(
                self.reader.read, group.numbered, concurrency
            ),
            is_repeatable=True,
            package=self.package,
            reporter=self._reporter,
        )
        return computers.begin(work, self.usage_query.add)
