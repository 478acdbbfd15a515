"""``CheckpointManager``: whole checkpoints of a run, at every step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import MutableMapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from typing_extensions import Self

from hapi_client.atomic_file import file_lock
from hapi_client.option_checks import check_integer, check_seconds
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import parse_location
from hapi_protocol.errors import ClientError, HapiError
from hapi_training.checkpoints import ranks
from hapi_training.checkpoints.background import BackgroundWrites
from hapi_training.checkpoints.content import RunState, checked
from hapi_training.checkpoints.folder import SharedWrite, place_of
from hapi_training.checkpoints.swift_folder import SwiftFolder
from hapi_training.checkpoints.torch_file import FileBytes, layout_of
from hapi_training.checkpoints.uploads import (
    CheckpointStats,
    CommittedFile,
    Uploads,
)
from hapi_training.membership import WorkerLostError
from hapi_training.store import RENDEZVOUS_VARIABLE

logger = logging.getLogger(__name__)

_SMALL_BYTES = 8 << 10
"""Storages up to which the first rank's bytes are those of the checkpoint:
random numbers and counters may differ between ranks."""


class CheckpointManager:
    """Saves the state of a run at every step, behind the loop.

    ::

        remote = "swift://runs/pets"
        with CheckpointManager(state, remote=remote) as checkpoints:
            checkpoints.restore()
            for epoch in range(data.epoch, 5):
                ...
                optimizer.step()
                optimizer.zero_grad()
                checkpoints.save()

    A checkpoint is a file for ``torch.load``, which all ranks write together
    while the loop goes on: :meth:`save` copies buffers, random numbers and
    positions; parameters and the optimizer's state stay where they are, and
    the next ``step`` of an optimizer in ``state`` waits until they are
    written.  Who changes them otherwise calls :meth:`wait` before.

    All ranks call the methods at the same steps; if one fails, all do.

    Args:
        state: what is saved, by name: objects with ``state_dict`` and
            ``load_state_dict``, such as tail, optimizer, data and virtual
            nodes, or values, which :meth:`restore` replaces in this mapping.
        local: folder of this run's checkpoints, or a file (``….pt``) that
            each one replaces; None for a temporary folder (``TMPDIR``), of
            which nothing is left at the end.
        remote: ``swift://container/prefix``, to which they are uploaded
            behind the loop; one at a time, and then the newest.
        every: a checkpoint is written at each step whose number this divides;
            without virtual nodes, each time after so many calls of
            :meth:`save`.
        keep: number of checkpoints that are kept.
        verify: write digests of all tensors, which :meth:`restore` compares;
            takes the time of reading them in each :meth:`save`.
        connection: connection to the account of ``remote``; None for one
            by the environment.
        timeout_seconds: longest wait for another rank that does not write.

    Attributes:
        stats: what the checkpoints have cost.
        timeout_seconds: as given.

    Raises:
        ClientError: ``bad_configuration`` naming the value.
    """

    def __init__(
        self,
        state: MutableMapping[str, Any],
        *,
        local: str | os.PathLike[str] | None = None,
        remote: str | None = None,
        every: int = 1,
        keep: int = 2,
        verify: bool = False,
        connection: Connection | None = None,
        timeout_seconds: float = 30.0,
    ) -> None:
        check_integer("every", every, 1)
        check_integer("keep", keep, 1)
        self.timeout_seconds = timeout_seconds
        check_seconds(self, "timeout_seconds")
        self._closing = ExitStack()
        if local is None:
            if remote is None:
                raise ClientError(
                    "bad_configuration",
                    "checkpoints have no place; give a folder as local=, "
                    "swift://container/prefix as remote=, or both",
                )
            local = self._closing.enter_context(
                TemporaryDirectory(prefix="hapi-checkpoints-")
            )
        self.stats = CheckpointStats()
        self._state = RunState(state, uuid4().hex, verify=verify)
        self._folder = place_of(Path(local))
        self._uploads: Uploads | None = None
        if remote is not None:
            location = parse_location(remote)
            if connection is None:
                connection = self._closing.enter_context(Connection())
            self._uploads = Uploads(
                SwiftFolder(
                    connection,
                    location,
                    timeout_seconds,
                    is_shared=self._is_elastic,
                ),
                keep,
                self.stats,
            )
            self._closing.callback(self._uploads.close)
        self._every, self._keep = every, keep
        self._superseded: list[int] = []
        self._is_open = self._is_locked = False
        self._writes = BackgroundWrites(self.stats, self._uploads)
        for optimizer in self._state.optimizers():
            hook = optimizer.register_step_pre_hook(self._before_step)
            self._closing.callback(hook.remove)
        self._closing.callback(self._writes.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._closing:
            try:
                self.wait()
            except HapiError as error:
                if kind is None:
                    raise
                # The block's own error is the more important one.
                logger.warning("%s", error.message)

    def save(self) -> None:
        """Saves the state of this step, if it is its turn.

        Raises:
            ClientError: of this or of the last save: ``bad_configuration`` if
                it cannot be written, ``worker_lost``, or ``bad_state`` for a
                folder of another run.  The checkpoints before are whole, and
                training may go on.
        """
        self._state.num_calls += 1
        # By the number of the step: a worker that joins has called less.
        if self._state.step % self._every:
            return
        began = time.monotonic()
        try:
            planned = self._planned(self._state.content())
        except WorkerLostError as error:
            # The others go on, if they may.
            self._state.recover(error)
            logger.warning("a checkpoint is missing: %s", error.message)
            return
        write, data, file, is_uploaded = planned
        self._writes.add(write, data, file, now=is_uploaded)
        if not write.writer:
            self._writes.then(partial(self._prune, file.step))
        self.stats.seconds_blocked += time.monotonic() - began

    def wait(self) -> None:
        """Waits until the last checkpoint is whole, and in Swift.

        Raises:
            HapiError: as of :meth:`save`.
        """
        self._finish()
        if self._uploads is not None:
            self._uploads.wait()

    def _before_step(self, *_: object) -> None:
        # An error is raised by the next save(), on all ranks.
        self._writes.wait_for_bytes()

    def _finish(self) -> None:
        """Waits for the write; raises its error, and that of an upload."""
        try:
            self._writes.finish()
        except ClientError as error:
            if error.code != "worker_lost" or not self._is_elastic:
                raise
            logger.warning("a checkpoint is missing: %s", error.message)

    def _prune(self, step: int) -> None:
        """Deletes old checkpoints, and what writes have left."""
        for other in self._superseded:
            # Of a run that began again before them.
            if other > step:
                self._folder.remove(other)
        self._superseded = []
        self._folder.clean(step)
        for other in self._folder.steps()[self._keep :]:
            self._folder.remove(other)

    def restore(self) -> bool:
        """Loads the newest whole checkpoint that any rank has, on all ranks.

        Returns:
            False if there is none.

        Raises:
            ClientError: ``bad_state`` if none of those there are can be
                loaded, or if the newest belongs to another model, to other
                features or to a state with other names.
        """
        self.wait()
        if ranks.size() == 1:
            self._lock()
        steps = ranks.gathered(self._folder.steps())
        # With those in Swift behind those of the ranks.
        (*_, there) = steps = [*steps, self._steps_there()]
        reasons: list[str] = []
        for step in sorted(set(chain.from_iterable(steps)), reverse=True):
            owner = next(r for r, own in enumerate(steps) if step in own)
            content = self._read(step, owner, reasons)
            if content is None and owner < ranks.size() and step in there:
                content = self._read(step, ranks.size(), reasons)
            if content is not None:
                self._state.load(content)
                self._superseded = [
                    s for s in self._folder.steps() if s > step
                ]
                if self._uploads is not None:
                    self._uploads.superseded = [s for s in there if s > step]
                return True
        if reasons:
            raise ClientError(
                "bad_state",
                f"no checkpoint can be loaded: {'; '.join(reasons)}; give "
                "another place, or delete them to start from the beginning",
            )
        if self._uploads is not None:
            # A run may have been killed before its first checkpoint.
            run = self._uploads.folder.run()
            self._state.run = run or self._state.run
        return False

    def _steps_there(self) -> list[int]:
        """Steps of the checkpoints in Swift, equal on all ranks."""

        def steps() -> list[int]:
            if self._uploads is None or ranks.rank():
                return []
            folder = self._uploads.folder
            folder.known = folder.pointer()
            return folder.steps()

        return ranks.together(steps)[0]

    def _read(
        self, step: int, owner: int, reasons: list[str]
    ) -> dict[str, Any] | None:
        """Returns a checkpoint on all ranks; None if it is damaged.

        Args:
            step: its step.
            owner: rank that has it; the number of ranks for that in Swift.
            reasons: gets the reason.
        """
        if owner == ranks.size():
            data, where = self._downloaded(step), f"step {step} in Swift"
        else:
            is_mine, folder = ranks.rank() == owner, self._folder
            pieces = ranks.together(
                lambda: folder.whole(step) if is_mine else b""
            )
            data, where = pieces[owner], str(folder.file(step))
        try:
            return checked(data, where)
        except ClientError as error:
            reasons.append(error.message)
            logger.warning("passing over a checkpoint: %s", error.message)
            return None

    def _downloaded(self, step: int) -> bytes:
        """Reads a checkpoint in Swift by ranges that the ranks share."""
        assert self._uploads is not None
        remote = self._uploads.folder
        rank, size = ranks.rank(), ranks.size()
        etag, length = ranks.together(lambda: remote.version(step))[0]
        part = -(-length // size)
        start = min(length, rank * part)
        stop = min(length, start + part)
        return b"".join(
            ranks.together(lambda: remote.read(step, etag, start, stop))
        )

    def _planned(
        self, content: dict[str, Any]
    ) -> tuple[SharedWrite, FileBytes, CommittedFile, bool]:
        """Agrees with the other ranks on a file, and on who writes what.

        Returns:
            The write, its bytes, the file, and whether it is uploaded now.
        """
        rank, size = ranks.rank(), ranks.size()
        layout, storages = layout_of(content)
        if size > 1:
            if not rank:
                layout = layout.filled(storages, _SMALL_BYTES)
            storages = [s for s in storages if s.nbytes() > _SMALL_BYTES]
        is_idle = self._uploads is None or self._uploads.is_idle
        self._state.run, attempt, layout, is_idle = ranks.broadcast(
            (self._state.run, uuid4().hex, layout, is_idle)
        )

        def opened() -> str:
            self._finish()
            if not layout.fits(storages):
                raise ClientError(
                    "bad_state", "its state has other tensors than rank 0's"
                )
            return self._opened()

        folders = ranks.together(opened)
        writers = [r for r in range(size) if folders[r] == folders[rank]]
        writer = writers.index(rank)
        if not self._is_open and not self._is_elastic:
            ranks.together(lambda: None if writer else self._lock())
            self._is_open = True
        file = CommittedFile(
            *(self._state.step, attempt, layout.size, rank, size),
            ranks.group_end(),
        )
        write = SharedWrite(
            self._folder,
            file.step,
            attempt,
            writer,
            len(writers),
            self.timeout_seconds,
            file.has_ended,
        )
        return write, FileBytes(layout, storages), file, is_idle

    @property
    def _is_elastic(self) -> bool:
        return RENDEZVOUS_VARIABLE in os.environ

    def _lock(self) -> None:
        """Keeps other runs from using the folder.

        Not with a rendezvous: a worker that was given up may have the lock.
        """
        if not self._is_locked and not self._is_elastic:
            self._closing.enter_context(file_lock(self._folder.locked))
            self._is_locked = True
            self._folder.clean()

    def _opened(self) -> str:
        """Makes sure that the folder is this run's; returns its id."""
        owner = self._folder.owner(self._state.run)
        if owner["run"] != self._state.run:
            raise ClientError(
                "bad_state",
                f"{self._folder.place} has checkpoints of another run; call "
                "restore() to go on with it, or give another place as local=",
            )
        if self._uploads is not None and not ranks.rank():
            self._uploads.folder.claim(self._state.run)
        folder: str = owner["folder"]
        return folder
