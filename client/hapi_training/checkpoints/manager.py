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
from typing import Any
from uuid import uuid4

import torch
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path
from typing_extensions import Self

from hapi_client.atomic_file import file_lock
from hapi_client.option_checks import check_integer
from hapi_protocol.errors import ClientError
from hapi_training.checkpoint_file import (
    check_features_match,
    random_state,
    set_random_state,
)
from hapi_training.checkpoints import ranks
from hapi_training.checkpoints.folder import VERSION, Folder, SharedWrite
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
    """

    saved: int = 0
    seconds_blocked: float = 0.0
    seconds_written: float = 0.0


class CheckpointManager:
    """Saves the state of a run at every step, behind the loop.

    ::

        with CheckpointManager(state, local="run") as checkpoints:
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
        local: folder of this run's checkpoints.
        every: number of calls of :meth:`save` for each checkpoint.
        keep: number of checkpoints that are kept.
        verify: write digests of all tensors, which :meth:`restore` compares;
            takes the time of reading them in each :meth:`save`.
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
        local: str | os.PathLike[str],
        every: int = 1,
        keep: int = 2,
        verify: bool = False,
        timeout_seconds: float = 30.0,
    ) -> None:
        check_integer("every", every, 1)
        check_integer("keep", keep, 1)
        self._state = state
        self._folder = Folder(Path(local))
        self._every, self._keep = every, keep
        self._verify, self._timeout = verify, timeout_seconds
        self._run = uuid4().hex
        self._num_calls = 0
        self._superseded: list[int] = []
        self._is_locked = False
        self._closing = ExitStack()
        self._written: Future[None] | None = None
        self._committed: Future[None] | None = None
        self._writer = ThreadPoolExecutor(1, "hapi-checkpoint")
        self.stats = CheckpointStats()
        for optimizer in self._optimizers():
            hook = optimizer.register_step_pre_hook(self._before_step)
            self._closing.callback(hook.remove)
        self._closing.callback(self._writer.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._closing:
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
        self._finish()
        content = self._content()
        write, data = self._planned(content)
        self._written = self._writer.submit(self._write, write, data)
        self._committed = self._writer.submit(
            self._commit, write, data.size, self._step, self._written
        )
        self.stats.seconds_blocked += time.monotonic() - began

    def wait(self) -> None:
        """Waits until the last checkpoint is whole.

        Raises:
            ClientError: as of :meth:`save`.
        """
        self._finish()

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
        committed, self._committed, self._written = self._committed, None, None
        if committed is None:
            return
        try:
            committed.result()
        except ClientError as error:
            is_elastic = RENDEZVOUS_VARIABLE in os.environ
            if error.code != "worker_lost" or not is_elastic:
                raise
            logger.warning("a checkpoint is missing: %s", error.message)

    def _write(self, write: SharedWrite, data: FileBytes) -> None:
        began = time.monotonic()
        write.write(data)
        self.stats.seconds_written += time.monotonic() - began

    def _commit(
        self, write: SharedWrite, size: int, step: int, written: Future[None]
    ) -> None:
        written.result()
        write.commit(size)
        self.stats.saved += 1
        if write.writer:
            return
        for other in self._superseded:
            # Of a run that began again before them.
            if other > step:
                self._folder.remove(other)
        self._superseded = []
        self._folder.clean(step)
        for other in self._folder.steps()[self._keep :]:
            self._folder.remove(other)

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
        reasons: list[str] = []
        for step in sorted(set(chain.from_iterable(steps)), reverse=True):
            owner = next(r for r, own in enumerate(steps) if step in own)
            content = self._read(step, owner, reasons)
            if content is not None:
                self._load(content)
                return True
        if reasons:
            raise ClientError(
                "bad_state",
                f"no checkpoint in {self._folder.path} can be loaded: "
                f"{'; '.join(reasons)}; delete them to start from the "
                "beginning",
            )
        return False

    def _read(
        self, step: int, owner: int, reasons: list[str]
    ) -> dict[str, Any] | None:
        """Returns a checkpoint on all ranks; None if it is damaged."""
        rank, path = ranks.rank(), self._folder.file(step)
        data: bytes | None = None
        reason = ""
        if rank == owner:
            try:
                data = path.read_bytes()
                _check(loaded(data))
            except MemoryError:
                raise
            except Exception as error:  # the file may contain anything
                reason = f"{path.name}: {type(error).__name__}: {error}"
        reason = ranks.gathered(reason)[owner]
        if reason:
            reasons.append(reason)
            logger.warning("passing over a checkpoint: %s", reason)
            return None
        data = ranks.broadcast(data, owner)
        assert data is not None, "its owner has read it"
        content: dict[str, Any] = loaded(data)
        return content

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
        newest = content["step"]
        self._superseded = [s for s in self._folder.steps() if s > newest]

    def _planned(
        self, content: dict[str, Any]
    ) -> tuple[SharedWrite, FileBytes]:
        """Agrees with the other ranks on a file, and on who writes what."""
        layout, storages = layout_of(content)
        if ranks.size() > 1:
            if not ranks.rank():
                layout = layout.filled(storages, _SMALL_BYTES)
            storages = [s for s in storages if s.nbytes() > _SMALL_BYTES]
        self._run, attempt, layout = ranks.broadcast(
            (self._run, uuid4().hex, layout)
        )
        # All ranks fail, or none.
        error, folder = "", ""
        try:
            folder = self._opened()
            if not layout.fits(storages):
                error = "its state has other tensors than that of rank 0"
        except ClientError as caught:
            error = caught.message
        facts = ranks.gathered((folder, error))
        for rank, (_, text) in enumerate(facts):
            if text:
                where = f"rank {rank}: " if len(facts) > 1 else ""
                raise ClientError("bad_state", where + text)
        writers = [
            rank for rank, fact in enumerate(facts) if fact[0] == folder
        ]
        writer = writers.index(ranks.rank())
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
        return write, FileBytes(layout, storages)

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
        return owner["folder"]


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
