"""Lightning's checkpoints, written behind the loop and uploaded to Swift."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer

from hapi_client.atomic_file import write_atomically
from hapi_client.option_checks import check_integer
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import parse_location
from hapi_protocol.errors import ClientError, HapiError
from hapi_training.checkpoints.background import BackgroundWrites
from hapi_training.checkpoints.content import snapshot
from hapi_training.checkpoints.folder import (
    OneFile,
    SharedWrite,
    clean,
    file_name,
)
from hapi_training.checkpoints.swift_folder import SwiftFolder, readable
from hapi_training.checkpoints.torch_file import FileBytes, layout_of
from hapi_training.checkpoints.uploads import (
    CheckpointStats,
    CommittedFile,
    Uploads,
)
from hapi_training.state_transfer import loaded, values_of

logger = logging.getLogger(__name__)


class HapiCheckpointIO(TorchCheckpointIO, Callback):
    """Writes the checkpoints of a Lightning ``Trainer``.

    ::

        io = HapiCheckpointIO("swift://runs/pets")
        saved = ModelCheckpoint("run", every_n_train_steps=1, save_top_k=1)
        trainer = Trainer(plugins=[io], callbacks=[io, saved])
        trainer.fit(module, data, ckpt_path=io.fetch_latest("run"))

    The files are Lightning's own.  As a callback, too, it writes them while
    the loop goes on: optimizers wait before their next step.  Hooks that
    change parameters otherwise call :meth:`wait` before.  Without that, each
    save waits until its file is on the disk.

    Args:
        remote: ``swift://container/prefix``, to which they are uploaded
            behind the loop; one at a time, and then the newest.
        keep: number of checkpoints that are kept there; ``ModelCheckpoint``
            says how many are kept here.
        connection: connection to the account of ``remote``; None for one
            by the environment.

    Attributes:
        stats: what the checkpoints have cost.

    Raises:
        ClientError: ``bad_configuration`` naming the value.
    """

    def __init__(
        self,
        remote: str | None = None,
        *,
        keep: int = 2,
        connection: Connection | None = None,
    ) -> None:
        check_integer("keep", keep, 1)
        self.stats = CheckpointStats()
        self._location = None if remote is None else parse_location(remote)
        self._keep, self._connection = keep, connection
        self._run = uuid4().hex
        self._trainer: Trainer | None = None
        self._closing = ExitStack()
        self._remote: SwiftFolder | None = None
        self._uploads: Uploads | None = None
        self._writes: BackgroundWrites | None = None

    def _open(self) -> BackgroundWrites:
        """Starts the threads, unless they run."""
        if self._writes is None:
            remote = self._opened()
            if remote is not None:
                self._uploads = Uploads(remote, self._keep, self.stats)
                self._closing.callback(self._uploads.close)
            self._writes = BackgroundWrites(self.stats, self._uploads)
            self._closing.callback(self._writes.close)
        return self._writes

    def _opened(self) -> SwiftFolder | None:
        if self._remote is None and self._location is not None:
            connection = self._connection
            if connection is None:
                connection = self._closing.enter_context(Connection())
            self._remote = SwiftFolder(connection, self._location)
        return self._remote

    def fetch_latest(self, folder: str | os.PathLike[str]) -> str | None:
        """Returns the file of the newest checkpoint, here or in Swift.

        Args:
            folder: that of ``ModelCheckpoint``; gets one that is only in
                Swift.

        Returns:
            A path for ``ckpt_path``; None if there is no checkpoint.

        Raises:
            HapiError: of Swift, or ``bad_state`` if none can be loaded.
        """
        clean(Path(folder))
        files = [_step_of(path) for path in Path(folder).glob("*.ckpt")]
        newest = max((f for f in files if f is not None), default=None)
        reasons = [] if newest or not files else [f"those in {folder}"]
        remote = self._opened()
        if remote is not None:
            self._run = remote.run() or self._run
            remote.known = remote.pointer()
            for step in remote.steps():
                if newest is not None and step <= newest[0]:
                    break
                try:
                    data = readable(step, partial(remote.whole, step))
                    loaded(data)
                except HapiError as error:
                    if error.code != "bad_state":
                        raise
                    reasons.append(error.message)
                    logger.warning("passing over a file: %s", error.message)
                    continue
                except Exception as error:  # the object may contain anything
                    reasons.append(f"step {step} in {remote.location}")
                    logger.warning("%s: %s", reasons[-1], error)
                    continue
                path = Path(folder) / file_name(step).replace(".pt", ".ckpt")
                path.parent.mkdir(parents=True, exist_ok=True)
                # Other ranks may write it at the same time.
                own = path.with_name(f"{path.name}.{uuid4().hex[:8]}")
                with write_atomically(own) as file:
                    file.write(data)
                own.replace(path)
                return str(path)
        if newest is None and reasons:
            raise ClientError(
                "bad_state",
                f"no checkpoint can be loaded: {', '.join(reasons)}; delete "
                "them to start from the beginning",
            )
        return None if newest is None else str(newest[1])

    def setup(self, trainer: Trainer, *_: object, **__: object) -> None:
        """Writes behind the loop from now on: optimizers will wait."""
        self._trainer = trainer

    def on_before_optimizer_step(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Waits until the parameters are written, before they change."""
        if self._writes is not None:
            self._writes.wait_for_bytes()

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Writes a checkpoint.

        Raises:
            ClientError: of this or of the last one: ``bad_configuration`` if
                it cannot be written or loaded again, or ``bad_state`` for a
                prefix of another run.
        """
        if storage_options is not None or "://" in str(path):
            raise ClientError(
                "bad_configuration",
                f"{path} is no local path, or has storage_options; give a "
                "folder here, and swift://container/prefix as remote=",
            )
        began = time.monotonic()
        writes = self._open()
        writes.finish()
        if self._remote is not None:
            self._remote.claim(self._run)
        trainer = self._trainer
        content, _ = snapshot(
            values_of(checkpoint, "the checkpoint"),
            () if trainer is None else trainer.optimizers,
        )
        layout, storages = layout_of(content)
        step, attempt = checkpoint["global_step"], uuid4().hex
        place = OneFile(Path(path))
        writes.add(
            SharedWrite(place, step, attempt, 0, 1, 1, 0.0, lambda: True),
            FileBytes(layout, storages),
            CommittedFile(step, attempt, layout.size),
            now=self._uploads is None or self._uploads.is_idle,
        )
        if trainer is None:
            writes.finish()
        self.stats.seconds_blocked += time.monotonic() - began

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = "cpu",
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint; runs no code of it unless told so."""
        if self._writes is not None:
            self._writes.finish()
        return super().load_checkpoint(
            Path(path), map_location, weights_only is not False
        )

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Deletes a file, when the last one that was saved is whole."""
        self._open().then(lambda: Path(path).unlink(missing_ok=True))

    def wait(self) -> None:
        """Waits until the last checkpoint is whole, and in Swift.

        Raises:
            HapiError: of the write, or of Swift.
        """
        if self._writes is not None:
            self._writes.wait()

    def teardown(self, *_: object, **__: object) -> None:
        """Waits, and ends the threads; the next save starts them again."""
        self._trainer = None
        with self._closing.pop_all():
            try:
                self.wait()
            finally:
                self._writes = self._uploads = self._remote = None


def _step_of(path: Path) -> tuple[int, Path] | None:
    """Returns the step of a checkpoint of Lightning; None if it is none."""
    try:
        content = torch.load(path, "cpu", weights_only=True, mmap=True)
        return int(content["global_step"]), path
    except Exception as error:  # the file may contain anything
        logger.warning("passing over %s: %s", path, error)
        return None
