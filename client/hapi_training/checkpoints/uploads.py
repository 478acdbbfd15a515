"""Uploads behind the loop: one at a time, and then the newest."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hapi_client.swift.retry import is_outage
from hapi_protocol.errors import HapiError, make_error
from hapi_training.checkpoints.segments import Segment
from hapi_training.checkpoints.swift_folder import SwiftFolder

T = TypeVar("T")
logger = logging.getLogger(__name__)

# As FeatureDataset's reads (ReadConfig.retry_seconds).
DEADLINE_SECONDS = 300.0
OUTAGE_SECONDS = 2.0
"""Wait for a Swift that is away, after those of each request."""


@dataclass
class CheckpointStats:
    """Costs of the checkpoints so far, on this rank.

    Attributes:
        saved: whole checkpoints.
        seconds_blocked: seconds that the loop has waited, in ``save`` and in
            steps of its optimizers.
        seconds_written: seconds in which this rank's part was written.
        uploaded: checkpoints whose part of this rank is in Swift.
        seconds_uploaded: seconds of these.
        dropped: checkpoints that were not uploaded, as newer ones came
            before the upload of an earlier one had ended.
    """

    saved: int = 0
    seconds_blocked: float = 0.0
    seconds_written: float = 0.0
    uploaded: int = 0
    seconds_uploaded: float = 0.0
    dropped: int = 0


class CommittedFile:
    """A whole file, open: later checkpoints may delete it.

    Attributes:
        step: step of the checkpoint.
        attempt: text that is equal on all ranks for this write.
        size: length in bytes.
        rank: this rank.
        num_ranks: ranks that upload it together.
        has_ended: returns True if the others do so no more.
    """

    def __init__(
        self,
        step: int,
        attempt: str,
        size: int,
        rank: int = 0,
        num_ranks: int = 1,
        has_ended: Callable[[], bool] = lambda: True,
    ) -> None:
        self.step, self.attempt, self.size = step, attempt, size
        self.rank, self.num_ranks = rank, num_ranks
        self.has_ended = has_ended
        self._file: int | None = None

    def open(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)

    def read(self, offset: int, length: int) -> bytes:
        assert self._file is not None, "it was opened"
        return os.pread(self._file, length, offset)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Uploads:
    """Uploads checkpoints in a thread.

    Args:
        folder: where they go.
        keep: number of checkpoints that are kept there.
        stats: gets the costs.

    Attributes:
        deadline_seconds: longest wait for a Swift that is away.
        superseded: later steps there, of before a restore.
    """

    def __init__(
        self, folder: SwiftFolder, keep: int, stats: CheckpointStats
    ) -> None:
        self.folder = folder
        self.deadline_seconds = DEADLINE_SECONDS
        self.superseded: list[int] = []
        self._keep, self._stats = keep, stats
        self._has_collected = False
        self._running: Future[None] | None = None
        self._waiting: Future[CommittedFile] | None = None
        self._executor = ThreadPoolExecutor(1, "hapi-upload")
        self.close: Callable[[], None] = self._executor.shutdown

    @property
    def is_idle(self) -> bool:
        return self._running is None or self._running.done()

    def add(self, file: Future[CommittedFile], *, now: bool) -> None:
        """Uploads a file when it is whole.

        Args:
            file: the file; it is closed afterwards.
            now: equal on all ranks; False to let it wait until :meth:`wait`,
                or a newer one, which takes its place.
        """
        if self._waiting is not None:
            self._waiting.result().close()
            self._waiting = None
            self._stats.dropped += 1
        if now:
            self._running = self._executor.submit(self._upload, file)
        else:
            self._waiting = file

    def check(self) -> None:
        """Raises the error of an upload that has failed."""
        if self._running is not None and self._running.done():
            running, self._running = self._running, None
            running.result()

    def forget_waiting(self) -> None:
        """Uploads no file any more that waits."""
        self._waiting = None

    def wait(self) -> None:
        """Waits until the newest file is in Swift.

        Raises:
            HapiError: of Swift, or ``worker_lost``.
        """
        while self._running is not None or self._waiting is not None:
            running, self._running = self._running, None
            if running is not None:
                running.result()
            if self._waiting is not None:
                waiting, self._waiting = self._waiting, None
                self._running = self._executor.submit(self._upload, waiting)

    def _upload(self, committed: Future[CommittedFile]) -> None:
        file, began = committed.result(), time.monotonic()
        try:
            sent = self._waiting_out(lambda: self._send(file))
            if not file.rank:
                self._waiting_out(lambda: self._commit(file, sent))
        except HapiError as error:
            raise make_error(
                error.code,
                f"the checkpoint of step {file.step} is not in "
                f"{self.folder.location}: {error.message}; those before it "
                "stay, and training may go on",
                object_name=error.object_name,
                trans_id=error.trans_id,
            ) from error
        finally:
            file.close()
        self._stats.uploaded += 1
        self._stats.seconds_uploaded += time.monotonic() - began

    def _send(self, file: CommittedFile) -> dict[int, Segment]:
        return self.folder.upload(
            file.step,
            file.attempt,
            file.size,
            file.read,
            file.rank,
            file.num_ranks,
        )

    def _commit(
        self, file: CommittedFile, sent: Mapping[int, Segment]
    ) -> None:
        self.folder.commit(
            *(file.step, file.attempt, file.size, file.read),
            file.has_ended,
            sent,
        )
        self.folder.prune(file.step, self._keep, self.superseded)
        self.superseded = []
        if not self._has_collected:
            self.folder.collect(file.step)
            self._has_collected = True

    def _waiting_out(self, function: Callable[[], T]) -> T:
        """Calls a function again while Swift does not answer.

        Raises:
            HapiError: when the deadline has passed, or another one.
        """
        began, is_noted = time.monotonic(), False
        while True:
            try:
                return function()
            except HapiError as error:
                seconds = time.monotonic() - began
                if not is_outage(error) or seconds > self.deadline_seconds:
                    raise
                if not is_noted:
                    is_noted = True
                    logger.warning("an upload waits: %s", error.message)
            time.sleep(OUTAGE_SECONDS)
