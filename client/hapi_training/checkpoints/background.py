"""Writes behind the loop: one at a time, and then their uploads."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hapi_training.checkpoints.folder import SharedWrite
from hapi_training.checkpoints.torch_file import FileBytes
from hapi_training.checkpoints.uploads import (
    CheckpointStats,
    CommittedFile,
    Uploads,
)
from hapi_training.turns import given_back


class BackgroundWrites:
    """Writes checkpoints in a thread.

    Args:
        stats: gets the costs.
        uploads: uploads them; None to keep them here.
    """

    def __init__(
        self, stats: CheckpointStats, uploads: Uploads | None
    ) -> None:
        self._stats, self._uploads = stats, uploads
        self._written: Future[None] | None = None
        self._committed: Future[CommittedFile] | None = None
        self._executor = ThreadPoolExecutor(1, "hapi-checkpoint")
        self._later: list[Future[None]] = []

    def add(
        self,
        write: SharedWrite,
        data: FileBytes,
        file: CommittedFile,
        *,
        now: bool = True,
    ) -> None:
        """Writes a checkpoint; the one before has been finished.

        Args:
            write: the write.
            data: bytes of the file.
            file: the file.
            now: as for :meth:`Uploads.add`.
        """
        written = self._executor.submit(self._write, write, data)
        self._written = written
        self._committed = self._executor.submit(
            self._commit, write, file, written
        )
        if self._uploads is not None:
            self._uploads.add(self._committed, now=now)

    def _write(self, write: SharedWrite, data: FileBytes) -> None:
        began = time.monotonic()
        write.write(data)
        self._stats.seconds_written += time.monotonic() - began

    def _commit(
        self, write: SharedWrite, file: CommittedFile, written: Future[None]
    ) -> CommittedFile:
        written.result()
        path = write.commit(file.size)
        self._stats.saved += 1
        if self._uploads is not None:
            file.open(path)
        return file

    def then(self, function: Callable[[], None]) -> None:
        """Calls a function when the last write is whole, and only then.

        Nobody waits for it: deleting a large file takes long.
        """
        committed = self._committed

        def call() -> None:
            if committed is None or committed.exception() is None:
                function()

        self._later.append(self._executor.submit(call))

    def _check_later(self) -> None:
        for done in [each for each in self._later if each.done()]:
            self._later.remove(done)
            done.result()

    def close(self) -> None:
        """Ends the thread, when all is done."""
        self._executor.shutdown()
        self._check_later()

    def wait_for_bytes(self) -> None:
        """Waits until tensors may change; an error is reported later."""
        if self._written is not None:
            began = time.monotonic()
            _wait_for(self._written)
            self._written = None
            self._stats.seconds_blocked += time.monotonic() - began

    def finish(self) -> None:
        """Waits for the write; raises its error, and that of an upload."""
        committed, self._committed, self._written = self._committed, None, None
        if committed is not None:
            _wait_for(committed)
            if self._uploads and committed.exception() is not None:
                self._uploads.forget_waiting()
            committed.result()
        self._check_later()
        if self._uploads is not None:
            self._uploads.check()

    def wait(self) -> None:
        """Waits for the write, and for uploads; raises their errors."""
        self.finish()
        if self._uploads is not None:
            with given_back():
                self._uploads.wait()


def _wait_for(future: Future[Any]) -> None:
    """Waits, while other jobs may use the device."""
    if not future.done():
        with given_back():
            future.exception()
