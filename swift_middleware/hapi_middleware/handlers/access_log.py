"""Entries with a request's resource use in Swift's access log.

Swift's proxy-logging joins ``swift.log_info`` when the answer's iterator has
ended; if the client disconnected, it does so *before* it closes the iterator.
A stream's entry is therefore completed at the moment the log is written: this
ends the stream if it still runs, and asks the worker what the job used.

s3api passes on a copy of the request, whose log info proxy-logging does not
read.  For its callers the entry goes to the filter's own log when the stream
ends.
"""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol
from urllib.parse import quote

from hapi_middleware.concurrency import Timeout, map_ahead
from hapi_middleware.metrics import (
    OUTCOME_BROKEN,
    OUTCOME_DONE,
    OUTCOME_GONE,
)
from hapi_middleware.places.computer import Granted
from hapi_middleware.requests.annotation_request import Env
from hapi_middleware.worker.feature_stream import WorkerStream
from hapi_protocol import job_messages
from hapi_protocol.errors import HapiError
from hapi_protocol.headers import Annotation
from hapi_protocol.job_messages import Usage

ENDED_TIMEOUT_SECONDS = 1.0
"""Timeout of asking for the usage of an ended stream: it is known already."""
DISCONNECTED_TIMEOUT_SECONDS = 2.5
"""Timeout of asking for the usage of a stream that its client closed early.
The worker has to notice, and may have a micro-batch on the device.  Nobody
waits for the answer."""

MAX_ASKED = 8
"""Workers that are asked for a usage at a time."""
_OUTCOMES = {
    OUTCOME_DONE: job_messages.OUTCOME_DONE,
    OUTCOME_GONE: job_messages.OUTCOME_GONE,
    OUTCOME_BROKEN: job_messages.OUTCOME_FAILED,
}

HIT_ENTRY = "hapi:cache=hit"
"""Second entry of a request that was answered from the cache."""

_LOG_INFO = "swift.log_info"


class AnswerStream(Protocol):
    """The body of a streaming answer."""

    def __iter__(self) -> Iterator[bytes]: ...
    def __next__(self) -> bytes: ...
    def close(self) -> None: ...


def request_entry(
    annotation: Annotation, account: str, num_objects: int | None = None
) -> str:
    """The entry of a request for features or an index.

    No value contains a space, comma or semicolon.

    Args:
        annotation: annotation of the request.
        account: charged account.
        num_objects: number of objects in a request for many, else None.
    """
    model = annotation.model.quoted() if annotation.model else "-"
    wanted = f";wanted={annotation.samples}" if annotation.samples else ""
    if num_objects is not None:
        wanted = f";objects={num_objects}"
    return (
        f"hapi:model={model};cut={annotation.cut}{wanted}"
        f";account={quote(account, safe='')}"
    )


def profile_entry(account: str) -> str:
    """The entry of a request for a profile."""
    return f"hapi:profile=true;account={quote(account, safe='')}"


def usage_fields(usage: Usage) -> str:
    """The part of an entry that is known after the job's end."""
    reason = f";reason={usage.reason}" if usage.reason else ""
    return (
        f";samples={usage.samples};errors={usage.errors}"
        f";device_seconds={usage.device_seconds:.3f}"
        f";decode_seconds={usage.decode_seconds:.3f}"
        f";source_bytes={usage.source_bytes};sent_bytes={usage.sent_bytes}"
        f";outcome={usage.outcome}{reason}"
    )


def add_entry(env: Env, entry: str) -> None:
    """Adds an entry to the request's line in the access log."""
    env.setdefault(_LOG_INFO, []).append(entry)


class DeferredLogInfo(UserList[str]):
    """A ``swift.log_info`` whose last entry is completed when it is read.

    Args:
        entries: all entries; the last one is to be completed.
        complete: returns the rest of that entry; called once, by the first
            reader.
    """

    def __init__(
        self, entries: list[str], complete: Callable[[], str]
    ) -> None:
        super().__init__(entries)
        self._position = len(entries) - 1
        self._complete: Callable[[], str] | None = complete

    def __iter__(self) -> Iterator[str]:
        complete, self._complete = self._complete, None
        if complete is not None:
            self.data[self._position] += complete()
        return iter(self.data)


class UsageQuery:
    """Asks for a request's usage when the access log is written.

    It is the sum over all workers that granted the request's job: one that
    failed has used its devices too.

    Args:
        logger: Swift's.

    Attributes:
        stream: the job's stream, once it has started.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._granted: list[Granted] = []
        self._known: list[Usage] = []
        self._end: Mapping[str, Any] = {}
        self.stream: WorkerStream | None = None

    def add(self, granted: Granted) -> None:
        """Adds a job that a worker has granted."""
        self._granted.append(granted)

    def ended(
        self, outcome: str, error: HapiError | None, sent_bytes: int
    ) -> None:
        """Notes how a request of several jobs ended.

        Args:
            outcome: one of the metrics' outcomes of a stream.
            error: what broke it off, if anything did.
            sent_bytes: bytes that the client was sent.
        """
        self._end = {
            "outcome": _OUTCOMES[outcome],
            "reason": error.code if error else "",
            "sent_bytes": sent_bytes,
        }

    def settle(self, timeout: float = ENDED_TIMEOUT_SECONDS) -> None:
        """Asks for the usage of the jobs so far, which have ended."""
        asked, self._granted = self._granted, []
        ask = partial(self._usage, timeout=timeout)
        answers = map_ahead(ask, asked, MAX_ASKED)
        self._known += [usage for usage in answers if usage is not None]

    def __call__(self) -> str:
        """The rest of the entry; empty if no worker answers."""
        is_running = self.stream is not None and not self.stream.is_closed
        timeout = (
            DISCONNECTED_TIMEOUT_SECONDS
            if is_running
            else ENDED_TIMEOUT_SECONDS
        )
        try:
            if self.stream is not None:
                self.stream.close()
        except (Exception, Timeout):
            # The line must be written, whatever happens here.
            self._logger.exception("hapi: a stream cannot be closed")
        self.settle(timeout)
        if not self._known:
            return ""
        return usage_fields(replace(Usage.sum_of(self._known), **self._end))

    def _usage(self, granted: Granted, timeout: float) -> Usage | None:
        try:
            return granted.get_usage(timeout)
        except HapiError as error:
            self._logger.debug("hapi: a job's usage is unknown: %s", error)
        except (Exception, Timeout):
            self._logger.exception("hapi: a job's usage is unknown")
        return None


def complete_at_logging(env: Env, usage_query: UsageQuery) -> None:
    """Defers the rest of the last entry until the log is written."""
    env[_LOG_INFO] = DeferredLogInfo(list(env[_LOG_INFO]), usage_query)


@dataclass(eq=False)
class LoggedStream:
    """A stream whose entry goes to the filter's log when it ends.

    Args:
        stream: the answer's body.
        usage_query: asks for the stream's usage.
        entry: the entry to complete.
        trans_id: transaction id; Swift adds none to lines of this level.
        logger: Swift's.
    """

    stream: AnswerStream
    usage_query: UsageQuery
    entry: str
    trans_id: str
    logger: Any

    def __post_init__(self) -> None:
        self._is_logged = False

    def __iter__(self) -> LoggedStream:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self.stream)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the stream and writes the line.  Idempotent."""
        if self._is_logged:
            return
        self._is_logged = True
        try:
            entry = self.entry + self.usage_query()
        finally:
            # The query ends the worker's stream only, not its wrappers.
            self.stream.close()
        self.logger.info("%s (txn: %s)", entry, self.trans_id)
