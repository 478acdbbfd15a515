"""``CheckpointManager``: whole checkpoints of a run, at every step."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import time
from collections.abc import Iterator, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import torch
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path
from typing_extensions import Self

from hapi_client.atomic_file import file_lock
from hapi_client.option_checks import check_integer
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import parse_location
from hapi_protocol.errors import ClientError
from hapi_training.checkpoint_file import (
    check_features_match,
    random_state,
    set_random_state,
)
from hapi_training.checkpoints import ranks
from hapi_training.checkpoints.folder import (
    VERSION,
    Folder,
    SharedWrite,
    file_name,
)
from hapi_training.checkpoints.swift_folder import SwiftFolder
from hapi_training.checkpoints.torch_file import FileBytes, layout_of
from hapi_training.rendezvous import RENDEZVOUS_VARIABLE
from hapi_training.state_transfer import (
    LOAD_ERRORS,
    load_values,
    loaded,
    values_of,
)
from hapi_training.virtual_nodes.virtual_nodes import VirtualNodes

logger = logging.getLogger(__name__)

_SMALL_BYTES = 8 << 10
"""Storages up to which the first rank's bytes are those of the checkpoint:
random numbers and counters may differ between ranks."""


@dataclass
class CheckpointStats:
    """What checkpoints have cost so far, on this rank.

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


class _Upload:
    """A file of a checkpoint, to be uploaded by all ranks."""

    def __init__(self, step: int, attempt: str, size: int) -> None:
        self.step, self.attempt, self.size = step, attempt, size
        self.rank, self.num_ranks = ranks.rank(), ranks.size()
        self._file: int | None = None

    def open(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)

    def read(self, offset: int, length: int) -> bytes:
        assert self._file is not None
        return os.pread(self._file, length, offset)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


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

    All ranks call the methods at the same steps.

    Args:
        state: what is saved, by name: objects with ``state_dict`` and
            ``load_state_dict``, such as tail, optimizer, data and virtual
            nodes, or values, which :meth:`restore` replaces in this mapping.
        local: folder of this run's checkpoints; None for a temporary one
            (``TMPDIR``), of which nothing is left at the end.
        remote: ``swift://container/prefix``, to which they are uploaded
            behind the loop; one at a time, and then the newest.
        every: number of calls of :meth:`save` for each checkpoint.
        keep: number of checkpoints that are kept.
        verify: write digests of all tensors, which :meth:`restore` compares;
            takes the time of reading them in each :meth:`save`.
        connection: connection to the account of ``remote``; None for one
            by the environment.
        timeout_seconds: longest wait for another rank that does not write.

    Attributes:
        stats: what the checkpoints have cost.

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
        self._state = state
        self._folder = Folder(Path(local))
        self._remote: SwiftFolder | None = None
        if remote is not None:
            location = parse_location(remote)
            if connection is None:
                connection = self._closing.enter_context(Connection())
            self._remote = SwiftFolder(connection, location)
        self._every, self._keep = every, keep
        self._verify, self._timeout = verify, timeout_seconds
        self._run = uuid4().hex
        self._num_calls = 0
        self._superseded: list[int] = []
        self._superseded_there: list[int] = []
        self._is_locked = False
        self._written: Future[None] | None = None
        self._committed: Future[_Upload] | None = None
        self._uploading: Future[None] | None = None
        self._waiting: Future[_Upload] | None = None
        self._writer = ThreadPoolExecutor(1, "hapi-checkpoint")
        self._uploader = ThreadPoolExecutor(1, "hapi-upload")
        self.stats = CheckpointStats()
        for optimizer in self._optimizers():
            hook = optimizer.register_step_pre_hook(self._before_step)
            self._closing.callback(hook.remove)
        self._closing.callback(self._writer.shutdown)
        self._closing.callback(self._uploader.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._closing:
            if kind is not None and ranks.size() > 1 and self._remote:
                # Others may have ended, and upload nothing any more.
                self._waiting = None
                self._remote.deadline_seconds = self._timeout
            try:
                self.wait()
            except ClientError as error:
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
        self._num_calls += 1
        if self._num_calls % self._every:
            return
        began = time.monotonic()
        content = self._content()
        write, data, attempt, is_uploaded = self._planned(content)
        self._written = self._writer.submit(self._write, write, data)
        upload = _Upload(self._step, attempt, data.size)
        self._committed = committed = self._writer.submit(
            self._commit, write, upload, self._written
        )
        if self._remote is not None:
            self._drop_waiting()
            if is_uploaded:
                self._uploading = self._uploader.submit(
                    self._upload, committed
                )
            else:
                self._waiting = committed
        self.stats.seconds_blocked += time.monotonic() - began

    def wait(self) -> None:
        """Waits until the last checkpoint is whole, and in Swift.

        Raises:
            HapiError: as of :meth:`save`.
        """
        self._finish()
        if self._uploading is not None:
            self._uploading.result()
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._uploading = self._uploader.submit(self._upload, waiting)
            self._uploading.result()
        self._uploading = None

    @property
    def _step(self) -> int:
        nodes = self._nodes
        return self._num_calls if nodes is None else nodes.step

    @property
    def _nodes(self) -> VirtualNodes | None:
        return next(
            (v for v in self._state.values() if isinstance(v, VirtualNodes)),
            None,
        )

    def _optimizers(self) -> Iterator[torch.optim.Optimizer]:
        for value in self._state.values():
            # Those of accelerate wrap another one.
            inner = getattr(value, "optimizer", value)
            if isinstance(inner, torch.optim.Optimizer):
                yield inner

    def _before_step(self, *_: object) -> None:
        """Waits until the parameters are written, before they change."""
        if self._written is not None:
            began = time.monotonic()
            self._written.result()
            self._written = None
            self.stats.seconds_blocked += time.monotonic() - began

    def _finish(self) -> None:
        """Waits for the write; raises its error, and that of an upload."""
        committed, self._committed, self._written = self._committed, None, None
        uploading = self._uploading
        try:
            if committed is not None:
                if committed.exception() is not None:
                    self._waiting = None
                committed.result()
            if uploading is not None and uploading.done():
                self._uploading = None
                uploading.result()
        except ClientError as error:
            is_elastic = RENDEZVOUS_VARIABLE in os.environ
            if error.code != "worker_lost" or not is_elastic:
                raise
            logger.warning("a checkpoint is missing: %s", error.message)

    def _drop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.result().close()
            self._waiting = None
            self.stats.dropped += 1

    def _write(self, write: SharedWrite, data: FileBytes) -> None:
        began = time.monotonic()
        write.write(data)
        self.stats.seconds_written += time.monotonic() - began

    def _commit(
        self, write: SharedWrite, upload: _Upload, written: Future[None]
    ) -> _Upload:
        written.result()
        write.commit(upload.size)
        self.stats.saved += 1
        if self._remote is not None:
            # Open: the next ones may delete it.
            upload.open(self._folder.file(upload.step))
        if not write.writer:
            for other in self._superseded:
                # Of a run that began again before them.
                if other > upload.step:
                    self._folder.remove(other)
            self._superseded = []
            self._folder.clean(upload.step)
            for other in self._folder.steps()[self._keep :]:
                self._folder.remove(other)
        return upload

    def _upload(self, committed: Future[_Upload]) -> None:
        upload, began = committed.result(), time.monotonic()
        assert self._remote is not None
        try:
            self._remote.upload(
                upload.step,
                upload.attempt,
                upload.size,
                upload.read,
                upload.rank,
                upload.num_ranks,
            )
        finally:
            upload.close()
        if not upload.rank:
            self._remote.commit(upload.step, upload.attempt, upload.size)
            self._remote.prune(upload.step, self._keep, self._superseded_there)
            self._superseded_there = []
            if not self.stats.uploaded:
                self._remote.collect(upload.step)
        self.stats.uploaded += 1
        self.stats.seconds_uploaded += time.monotonic() - began

    def _content(self) -> dict[str, Any]:
        values = values_of(self._state, "the state of the checkpoint")
        content = {
            "version": VERSION,
            "run": self._run,
            "step": self._step,
            "calls": self._num_calls,
            "state": copy.deepcopy(values, self._unchanged(values)),
            "random": random_state(_device_of(values)),
            "features": self._features(),
        }
        digests = _digests(content["state"]) if self._verify else None
        return {**content, "digests": digests}

    def _unchanged(self, values: Any) -> dict[int, Any]:
        """Tensors that change in steps of optimizers only, by their ids."""
        guarded = {
            tensor.untyped_storage()._cdata
            for optimizer in self._optimizers()
            for tensor in _tensors_of(
                [
                    [group["params"] for group in optimizer.param_groups],
                    list(optimizer.state.values()),
                ]
            )
        }
        return {
            id(tensor): tensor
            for tensor in _tensors_of(values)
            if tensor.untyped_storage()._cdata in guarded
        }

    def _features(self) -> dict[str, Any] | None:
        for value in self._state.values():
            if hasattr(value, "features_facts"):
                facts: dict[str, Any] = value.features_facts()
                return facts
        return None

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
                self._load(content)
                newest = content["step"]
                self._superseded = [
                    s for s in self._folder.steps() if s > newest
                ]
                self._superseded_there = [s for s in there if s > newest]
                return True
        if reasons:
            raise ClientError(
                "bad_state",
                f"no checkpoint can be loaded: {'; '.join(reasons)}; delete "
                "them to start from the beginning",
            )
        if self._remote is not None:
            # A run may have been killed before its first checkpoint.
            self._run = self._remote.run() or self._run
        return False

    def _steps_there(self) -> list[int]:
        """Steps of the checkpoints in Swift, equal on all ranks."""

        def steps() -> list[int]:
            if self._remote is None or ranks.rank():
                return []
            self._remote.known = self._remote.pointer()
            return self._remote.steps()

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
            data, where = self._downloaded(step), str(self._remote)
        else:
            is_mine, path = ranks.rank() == owner, self._folder.file(step)
            pieces = ranks.together(
                lambda: path.read_bytes() if is_mine else b""
            )
            data, where = pieces[owner], str(path.parent)
        try:
            content: dict[str, Any] = loaded(data)
            _check(content)
        except MemoryError:
            raise
        except Exception as error:  # the file may contain anything
            reasons.append(
                f"{file_name(step)} in {where}: {type(error).__name__}: "
                f"{error}"
            )
            logger.warning("passing over a checkpoint: %s", reasons[-1])
            return None
        return content

    def _downloaded(self, step: int) -> bytes:
        """Reads a checkpoint in Swift by ranges that the ranks share."""
        remote = self._remote
        assert remote is not None
        rank, size = ranks.rank(), ranks.size()
        etag, length = ranks.together(lambda: remote.version(step))[0]
        part = -(-length // size)
        start = min(length, rank * part)
        stop = min(length, start + part)
        return b"".join(
            ranks.together(lambda: remote.read(step, etag, start, stop))
        )

    def _load(self, content: dict[str, Any]) -> None:
        values = content["state"]
        features = self._features()
        if features is not None and content["features"] is not None:
            check_features_match(content["features"], features)
        try:
            load_values(self._state, values, "the checkpoint")
        except LOAD_ERRORS as error:
            raise ClientError(
                "bad_state",
                "the checkpoint belongs to another model or release: "
                f"{type(error).__name__}: {error}",
            ) from error
        set_random_state(_device_of(values), content["random"])
        self._run, self._num_calls = content["run"], content["calls"]

    def _planned(
        self, content: dict[str, Any]
    ) -> tuple[SharedWrite, FileBytes, str, bool]:
        """Agrees with the other ranks on a file, and on who writes what.

        Returns:
            The write, its bytes, its name among all attempts, and whether it
            is uploaded.
        """
        rank, size = ranks.rank(), ranks.size()
        layout, storages = layout_of(content)
        if size > 1:
            if not rank:
                layout = layout.filled(storages, _SMALL_BYTES)
            storages = [s for s in storages if s.nbytes() > _SMALL_BYTES]
        is_idle = self._uploading is None or self._uploading.done()
        self._run, attempt, layout, is_idle = ranks.broadcast(
            (self._run, uuid4().hex, layout, is_idle)
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
        if not writer:
            self._lock()
        write = SharedWrite(
            self._folder,
            self._step,
            attempt,
            writer,
            len(writers),
            self._timeout,
        )
        return write, FileBytes(layout, storages), attempt, is_idle

    def _lock(self) -> None:
        """Keeps other runs from using the folder; those of a rendezvous may.

        One of its workers that was given up may have the lock still.
        """
        if not self._is_locked and RENDEZVOUS_VARIABLE not in os.environ:
            self._closing.enter_context(file_lock(self._folder.path / "run"))
            self._is_locked = True
            self._folder.clean()

    def _opened(self) -> str:
        """Makes sure that the folder is this run's; returns its id."""
        owner = self._folder.owner(self._run)
        if owner["run"] != self._run:
            raise ClientError(
                "bad_state",
                f"the folder {self._folder.path} has checkpoints of another "
                "run; call restore() to go on with it, or give another folder "
                "as local=",
            )
        if self._remote is not None and not ranks.rank():
            self._remote.claim(self._run)
        folder: str = owner["folder"]
        return folder


def _tensors_of(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if torch.is_tensor(leaf)]


def _device_of(values: Any) -> torch.device:
    """Returns the device whose random numbers belong to a state."""
    devices = {
        tensor.device.type: tensor.device for tensor in _tensors_of(values)
    }
    return devices.get("cuda", torch.device("cpu"))


def _digests(values: Any) -> dict[str, str]:
    """Returns digests of all tensors, by their paths."""
    return {
        keystr(path): hashlib.sha256(
            leaf.detach()
            .cpu()
            .contiguous()
            .flatten()
            .view(torch.uint8)
            .numpy()
            .data
        ).hexdigest()
        for path, leaf in tree_leaves_with_path(values)
        if torch.is_tensor(leaf)
    }


def _check(content: Any) -> None:
    """Checks version and digests of a checkpoint.

    Raises:
        ValueError: naming what is wrong.
    """
    if content["version"] != VERSION:
        raise ValueError(f"its version is {content['version']!r}")
    digests = content["digests"]
    if digests is not None and digests != _digests(content["state"]):
        raise ValueError("its tensors are not those of their digests")
