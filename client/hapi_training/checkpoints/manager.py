"""``CheckpointManager``: whole checkpoints of a run, at every step."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import MutableMapping
from contextlib import ExitStack, nullcontext
from functools import partial
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any
from uuid import uuid4

from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import Self

from hapi_client.atomic_file import file_lock
from hapi_client.option_checks import check_integer, check_seconds
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import parse_location
from hapi_protocol.errors import ClientError, HapiError
from hapi_training.checkpoints import ranks
from hapi_training.checkpoints.agreement import (
    checksums,
    distinct,
    make_equal,
)
from hapi_training.checkpoints.background import BackgroundWrites
from hapi_training.checkpoints.content import RunState
from hapi_training.checkpoints.folder import (
    SharedWrite,
    most_writers,
    naming,
    place_of,
)
from hapi_training.checkpoints.restoring import newest_whole
from hapi_training.checkpoints.swift_folder import SwiftFolder
from hapi_training.checkpoints.torch_file import (
    FileBytes,
    layout_of,
    storages_of,
)
from hapi_training.checkpoints.uploads import (
    CheckpointStats,
    CommittedFile,
    Uploads,
)
from hapi_training.membership import WorkerLostError
from hapi_training.store import RENDEZVOUS_VARIABLE
from hapi_training.turns import given_back

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
    the next ``step`` of any optimizer waits until they are written.  Who
    changes them otherwise calls :meth:`wait` before.

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
        if not isinstance(state, MutableMapping):
            raise ClientError(
                "bad_configuration",
                f"state is of type {type(state).__name__}; give a mapping of "
                "names to what is saved, such as {'tail': tail}",
            )
        self._closing = ExitStack()
        self._process = os.getpid()
        if local is None:
            if remote is None:
                raise ClientError(
                    "bad_configuration",
                    "checkpoints have no place; give a folder as local=, "
                    "swift://container/prefix as remote=, or both",
                )
            local = mkdtemp(prefix="hapi-checkpoints-")
            # Also at the exit of the process, and without a block.
            remove = weakref.finalize(self, _remove, local, self._process)
            self._closing.callback(remove)
        self.stats = CheckpointStats()
        self._verify = verify
        self._state = RunState(state, uuid4().hex, verify=verify)
        self._folder = place_of(local)
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
        self._is_open = self._is_locked = self._is_closed = False
        self._writes = BackgroundWrites(self.stats, self._uploads)
        # Of all optimizers: one may be made later, or train the same tensors.
        hook = register_optimizer_step_pre_hook(self._before_step)
        self._closing.callback(hook.remove)
        self._closing.callback(self._writes.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if os.getpid() != self._process:
            # A fork has neither the threads nor the files.
            return
        with self._closing:
            self._is_closed = True
            if kind is None:
                self.wait()
                return
            try:
                self._wait_here()
            except HapiError as error:
                # The block's own error is the more important one.
                logger.warning("%s", error.message)

    def save(self) -> None:
        """Saves the state of this step, if it is its turn.

        Raises:
            ClientError: of this or of the last save: ``bad_configuration`` if
                it cannot be written, ``worker_lost``, or ``bad_state`` for a
                folder of another run, or for ranks that train different
                models.  The checkpoints before are whole, and training may
                go on.
        """
        self._check_open()
        self._state.num_calls += 1
        # By the number of the step: a worker that joins has called less.
        if self._state.step % self._every:
            return
        began = time.monotonic()
        try:
            # Ranks wait for each other more than once.
            with given_back() if ranks.size() > 1 else nullcontext():
                planned = self._planned()
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

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClientError(
                "bad_configuration",
                "this CheckpointManager has ended with its block; make "
                "another one",
            )

    def wait(self) -> None:
        """Waits until the last checkpoint is whole, and in Swift.

        Workers of a rendezvous wait for their own part of it.

        Raises:
            HapiError: as of :meth:`save`.
        """
        if self._is_elastic:
            self._wait_here()
        else:
            # The first rank's commit is that of all.
            ranks.together(self._wait_here)

    def _wait_here(self) -> None:
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
        with naming(self._folder.place):
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
                loaded, or if the newest belongs to another model or to other
                features; ``bad_configuration`` for a state with other names.
        """
        self._check_open()
        self.wait()
        if ranks.size() == 1:
            self._lock()
        remote = None if self._uploads is None else self._uploads.folder
        newest = newest_whole(self._folder, remote)
        if newest is not None:
            self._state.load(newest.content)
            self._superseded = newest.later_here
            if self._uploads is not None:
                self._uploads.superseded = newest.later_there
        elif remote is not None:
            # A run may have been killed before its first checkpoint.
            self._state.run = remote.run() or self._state.run
        return newest is not None

    def _planned(
        self,
    ) -> tuple[SharedWrite, FileBytes, CommittedFile, bool]:
        """Agrees with the other ranks on a file, and on who writes what.

        Returns:
            The write, its bytes, the file, and whether it is uploaded now.
        """
        rank, size = ranks.rank(), ranks.size()
        content: dict[str, Any] = {}

        def begun() -> tuple[Any, ...]:
            self._finish()
            content.update(self._state.content())
            is_idle = self._uploads is None or self._uploads.is_idle
            is_first = not self._is_open or self._verify
            facts = self._state.run, uuid4().hex, is_idle, is_first
            return (*facts, content["random"])

        facts = ranks.together(begun)
        self._state.run, attempt, is_idle, compares_all, _ = facts[0]
        content["random"] = distinct([each[-1][0] for each in facts])
        if size > 1:
            self._make_equal(content, compares_all)
        self._state.add_digests(content)
        layout, storages = layout_of(content)
        if size > 1:
            if not rank:
                layout = layout.filled(storages, _SMALL_BYTES)
            storages = [s for s in storages if s.nbytes() > _SMALL_BYTES]
        layout, max_writers = ranks.broadcast((layout, most_writers()))
        folders = ranks.together(self._opened)
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
            max_writers,
            self.timeout_seconds,
            file.has_ended,
        )
        return write, FileBytes(layout, storages), file, is_idle

    def _make_equal(self, content: dict[str, Any], compares_all: bool) -> None:
        """Gives all ranks the first one's values, where they may differ."""
        trained, storages = self._state.trained, storages_of(content)
        left_out = {
            storage._cdata
            for storage in storages
            if (
                not compares_all
                if storage._cdata in trained
                # Those of the first rank are in its layout.
                else storage.nbytes() <= _SMALL_BYTES
            )
        }
        sums = ranks.together(lambda: checksums(storages, left_out))
        make_equal(content, storages, sums, trained)

    @property
    def _is_elastic(self) -> bool:
        return RENDEZVOUS_VARIABLE in os.environ

    def _lock(self) -> None:
        """Keeps other runs from using the folder.

        Not with a rendezvous: a worker that was given up may have the lock.
        """
        if not self._is_locked and not self._is_elastic:
            with naming(self._folder.place):
                self._closing.enter_context(file_lock(self._folder.locked))
                self._is_locked = True
                self._folder.clean()

    def _opened(self) -> str:
        """Makes sure that the folder is this run's; returns its id."""
        with naming(self._folder.place):
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


def _remove(folder: str, process: int) -> None:
    # Not in a fork: it is the parent's.
    if os.getpid() == process:
        rmtree(folder, ignore_errors=True)
