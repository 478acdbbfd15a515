"""``torch.distributed.checkpoint`` in Swift, for state that ranks share.

``<prefix>/.metadata`` is written last, by one request, and names the objects
of the ranks.  Their names are new with each save, so that a save over an
earlier one leaves that whole until its own ``.metadata`` is there.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as names
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import _get_layout

from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import SCHEME
from hapi_protocol.errors import ClientError, NotFoundError
from hapi_training.checkpoints.object_files import ObjectFiles
from hapi_training.state_transfer import dumped, loaded

if torch.__version__ < "2.11":  # whose loader hides a reader's errors
    raise ImportError(
        "checkpoints of sharded models need torch 2.11 or later; this is "
        f"torch {torch.__version__}"
    )

Read: TypeAlias = torch.futures.Future[None]
_ALLOWED = {
    **{
        (names.__name__, kind.__name__): kind
        for kind in (
            *(names.Metadata, names.MetadataIndex, names.StorageMeta),
            *(names.TensorStorageMetadata, names.BytesStorageMetadata),
            *(names.ChunkStorageMetadata, names.TensorProperties),
            names._MEM_FORMAT_ENCODING,
        )
    },
    (_StorageInfo.__module__, "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    # Of checkpoints that were written to a disk, and copied to Swift.
    ("pathlib", "PosixPath"): pathlib.PosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PosixPath,
}
"""Classes and functions that ``.metadata`` may name."""


class SwiftStorageWriter(FileSystemWriter):
    """Writes a sharded checkpoint to Swift.

    ::

        dcp.save(state, storage_writer=SwiftStorageWriter("swift://runs/5"))

    ``dcp.async_save`` takes it, too, with threads and with processes.  One
    save may write to a prefix at a time.

    Args:
        place: ``swift://container/prefix``.
        connection: connection to the account; None for one by the
            environment, as processes of ``async_save`` need it.
        single_file_per_rank: see ``FileSystemWriter``.
        thread_count: files of a rank that are written at once.
        overwrite: False refuses to replace a checkpoint.

    Raises:
        ClientError: ``bad_configuration`` for a place that is none.
    """

    def __init__(
        self,
        place: str,
        *,
        connection: Connection | None = None,
        single_file_per_rank: bool = True,
        thread_count: int = 1,
        overwrite: bool = True,
    ) -> None:
        super().__init__(
            place,
            single_file_per_rank=single_file_per_rank,
            # An object is on its disks when Swift has answered.
            sync_files=False,
            thread_count=thread_count,
            overwrite=overwrite,
        )
        self.fs: Any = ObjectFiles(connection)
        self.path = self.fs.init_path(place)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Gives each rank names of its own, in all of this prefix's saves."""
        return [
            replace(plan, storage_data=_StoragePrefix(self._prefix(rank)))
            if plan.storage_data is None
            else plan
            for rank, plan in enumerate(plans)
        ]

    def _prefix(self, rank: int) -> str:
        return f"__{self.save_id}_{rank}_"

    def finish(
        self, metadata: Metadata, results: list[list[WriteResult]]
    ) -> None:
        """Makes the checkpoint; then deletes what earlier saves left there."""
        metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {
            result.index: result.storage_data
            for of_rank in results
            for result in of_rank
        }
        metadata.storage_meta = self.storage_meta()
        # Without collective operations each rank has a file of its own.
        rank = None if self.use_collectives else self.rank
        path = self._get_metadata_path(rank)
        self.fs.put(path, pickle.dumps(metadata))
        if self.use_collectives:
            self.fs.collect(self.path, self.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:  # type: ignore[type-arg]
        return str(checkpoint_id).startswith(SCHEME)


class SwiftStorageReader(FileSystemReader):
    """Reads a sharded checkpoint from Swift, on any number of ranks.

    ::

        dcp.load(state, storage_reader=SwiftStorageReader("swift://runs/5"))

    torch's own reader runs whatever code ``.metadata`` and values that are
    no tensors bring along.  This one refuses all but what torch writes into
    ``.metadata``, and values that ``torch.load(weights_only=True)`` refuses.

    Args:
        place: ``swift://container/prefix``.
        connection: connection to the account; None for one by the
            environment.

    Raises:
        ClientError: ``bad_configuration`` for a place that is none.
    """

    def __init__(
        self, place: str, *, connection: Connection | None = None
    ) -> None:
        super().__init__(place)
        self.fs: Any = ObjectFiles(connection)
        self.path = self.fs.init_path(place)

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Reads what the checkpoint contains.

        Raises:
            ClientError: ``bad_state`` naming what is wrong.
        """
        path = self._get_metadata_path(options.get("rank"))
        try:
            data = io.BytesIO(self.fs.get(path))
            metadata = _checked(_Unpickler(data).load())
        except NotFoundError as error:
            raise ClientError(
                "bad_state", f"{path} is missing: there is no whole checkpoint"
            ) from error
        except Exception as error:  # the object may contain anything
            raise ClientError(
                "bad_state",
                f"{path} is no description of a checkpoint: "
                f"{type(error).__name__}: {error}",
            ) from error
        metadata.storage_meta = metadata.storage_meta or names.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Read:
        # In the order of their bytes: these are read ahead.
        items = sorted(plan.items, key=self._place_of)
        safe: Any = _SafePlanner(planner)
        return super().read_data(replace(plan, items=items), safe)

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> Any:
        # torch.load begins at the end.
        return io.BytesIO(file.read(sinfo.offset, sinfo.length))

    def _place_of(self, item: ReadItem) -> tuple[str, int]:
        info = self.storage_data[item.storage_index]
        return info.relative_path, info.offset

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:  # type: ignore[type-arg]
        return str(checkpoint_id).startswith(SCHEME)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is refused")


def _checked(metadata: Any) -> Metadata:
    if not isinstance(metadata, Metadata):
        raise TypeError(f"it is a {type(metadata).__name__}")
    for info in metadata.storage_data.values():
        if "/" in info.relative_path:
            raise ValueError(f"it names {info.relative_path!r}")
    return metadata


class _SafePlanner:
    """Gives a planner values that need no code to be loaded.

    torch's own planner unpickles whatever it is given.
    """

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            content = loaded(value.getvalue())
        except Exception as error:  # the object may contain anything
            raise ClientError(
                "bad_state",
                f"{read_item.storage_index.fqn!r} of the checkpoint is "
                f"refused: {str(error).partition('. ')[0]}; if you trust it, "
                "name its classes by torch.serialization.add_safe_globals()",
            ) from error
        # Not the bytes that came: another reader might see others in them.
        self._planner.load_bytes(read_item, io.BytesIO(dumped(content)))
