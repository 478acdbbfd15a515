"""What a request used, in Swift's access log.

Swift's proxy-logging joins ``swift.log_info`` once the answer's iterator has
ended; when the client went away, it does so *before* it closes the iterator.
Nobody tells us of such a client in time, so that the line must ask: a stream's
entry is completed at the moment when the log is written, which ends the stream
if it still runs, and asks the worker what its job used.

s3api hands on a copy of the request, whose log info no proxy-logging reads:
for its callers the entry goes to the filter's own log, when the stream ends.
"""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from urllib.parse import quote

from swift.common.request_helpers import append_log_info

from hapi_middleware.concurrency import Timeout
from hapi_middleware.requests.annotation_request import Env
from hapi_middleware.worker.feature_stream import FeatureStream
from hapi_middleware.worker.worker_client import WorkerClient
from hapi_protocol.errors import HapiError
from hapi_protocol.headers import Annotation
from hapi_protocol.job_messages import Usage

ENDED_SECONDS = 1.0
"""For the usage of a stream that has ended: the worker has it already."""
GONE_SECONDS = 2.5
"""For that of a stream which its client gave up.  The worker has to notice,
and may have a micro-batch on the device; nobody waits meanwhile."""

HIT_ENTRY = "hapi:cache=hit"
"""Beside the entry of a request that was answered from the cache."""

_LOG_INFO = "swift.log_info"


class AnswerStream(Protocol):
    """What an answer's bytes are taken from."""

    def __iter__(self) -> Iterator[bytes]: ...
    def __next__(self) -> bytes: ...
    def close(self) -> None: ...


def request_entry(
    annotation: Annotation, account: str, num_objects: int | None = None
) -> str:
    """The entry of a request for features or an index.

    Args:
        num_objects: of a request for many.

    No space, comma or semicolon is in any value.
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
    """What follows in the entry when the job has ended."""
    reason = f";reason={usage.reason}" if usage.reason else ""
    return (
        f";samples={usage.samples};errors={usage.errors}"
        f";device_seconds={usage.device_seconds:.3f}"
        f";decode_seconds={usage.decode_seconds:.3f}"
        f";source_bytes={usage.source_bytes};sent_bytes={usage.sent_bytes}"
        f";outcome={usage.outcome}{reason}"
    )


def add_entry(env: Env, entry: str) -> None:
    """An entry that is complete."""
    append_log_info(env, entry)


class LateEntries(UserList[str]):
    """``swift.log_info`` whose last entry is completed when it is read.

    Args:
        entries: all so far; the last one is the one to complete.
        complete: called once, by the first reader, for the entry's rest.
    """

    def __init__(
        self, entries: list[str], complete: Callable[[], str]
    ) -> None:
        super().__init__(entries)
        self._place = len(entries) - 1
        self._complete: Callable[[], str] | None = complete

    def __iter__(self) -> Iterator[str]:
        complete, self._complete = self._complete, None
        if complete is not None:
            self.data[self._place] += complete()
        return iter(self.data)


class UsageQuestion:
    """Asks for a job's usage when the access log is written.

    Args:
        worker: that ran the job.
        job_id: of its grant.
        trans_id: of the client's request.
        logger: Swift's.

    Attributes:
        stream: of the job, once it has begun.
    """

    def __init__(
        self, worker: WorkerClient, job_id: str, trans_id: str, logger: Any
    ) -> None:
        self._worker = worker
        self._job_id = job_id
        self._trans_id = trans_id
        self._logger = logger
        self.stream: FeatureStream | None = None

    def __call__(self) -> str:
        """The entry's rest; empty where the worker does not tell."""
        is_given_up = self.stream is not None and not self.stream.is_closed
        seconds = GONE_SECONDS if is_given_up else ENDED_SECONDS
        try:
            if self.stream is not None:
                self.stream.close()
            usage = self._worker.get_usage(
                self._job_id, self._trans_id, seconds
            )
        except HapiError as error:
            self._logger.debug("hapi: a job's usage is not known: %s", error)
            return ""
        except (Exception, Timeout):
            # The line must be written, whatever happens here.
            self._logger.exception("hapi: a job's usage is not known")
            return ""
        return usage_fields(usage)


def complete_when_read(env: Env, question: UsageQuestion) -> None:
    """The request's last entry gets its rest when the log is written."""
    env[_LOG_INFO] = LateEntries(list(env[_LOG_INFO]), question)


class LoggedStream:
    """A stream whose entry goes to the filter's log when it ends.

    Args:
        stream: of the answer.
        question: for the stream's usage.
        entry: to complete.
        trans_id: of the request; Swift adds none to lines of this level.
        logger: Swift's.
    """

    def __init__(
        self,
        stream: AnswerStream,
        question: UsageQuestion,
        entry: str,
        trans_id: str,
        logger: Any,
    ) -> None:
        self._stream = stream
        self._question = question
        self._entry = entry
        self._trans_id = trans_id
        self._logger = logger
        self._is_logged = False

    def __iter__(self) -> LoggedStream:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._stream)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the stream and writes the line; harmless when repeated."""
        if self._is_logged:
            return
        self._is_logged = True
        try:
            entry = self._entry + self._question()
        finally:
            # The question ends the worker's stream, and knows no other.
            self._stream.close()
        self._logger.info("%s (txn: %s)", entry, self._trans_id)
