"""mosaicml-streaming, on its own shards, with its cache on the client.

The first epoch downloads each shard once; later epochs read the client's
disk.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, ClassVar

from streaming import StreamingDataset
from streaming.base.constant import (
    BARRIER_FILELOCK,
    CACHE_FILELOCK,
    SHM_TO_CLEAN,
)
from torch.utils.data import DataLoader

from benchmarks.opponents.opponent import Batches, Opponent
from benchmarks.opponents.training import (
    Decoder,
    Options,
    Place,
    Sample,
    collate,
)

CACHE = "mosaic"
MIXED_SHARDS = 2
"""Number of shards to shuffle over.  By default the library mixes 262,144
samples: the first batch would need every shard of a small data set."""

IMAGE = "image"
LABEL = "label"


class Photographs(StreamingDataset):
    """Images and labels."""

    def __init__(self, decode: Decoder, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._decode = decode
        # Forked workers would share the connection that fetched the index,
        # and receive each other's shards.
        for stream in self.streams:
            stream._downloader.clean_up()

    def __getitem__(self, at: Any) -> Sample:
        sample = super().__getitem__(at)
        return self._decode(sample[IMAGE]), int(sample[LABEL])


class Mosaic(Opponent):
    """Reads its own shards through Swift's S3 API."""

    PACKAGES: ClassVar = ("mosaicml-streaming", "boto3")
    GRID: ClassVar[list[Options]] = [
        {"num_workers": 0, "predownload": None, "channels_last": True},
        {"num_workers": 1, "predownload": None, "channels_last": True},
        {"num_workers": 2, "predownload": None, "channels_last": True},
        {"num_workers": 0, "predownload": 512, "channels_last": True},
        {"num_workers": 0, "predownload": None, "channels_last": False},
    ]

    def batches(self, epoch: int) -> Batches:
        os.environ.update(environment(self.place))
        photographs = Photographs(
            self.decode,
            remote=f"s3://{self.place.mds}",
            local=str(self._folder),
            shuffle=True,
            shuffle_block_size=self._shard_samples * MIXED_SHARDS,
            batch_size=self.task.batch_size,
            predownload=self.options["predownload"],
        )
        try:
            photographs.next_epoch = epoch
            yield from DataLoader(
                photographs,
                batch_size=self.task.batch_size,
                num_workers=self.options["num_workers"],
                collate_fn=collate,
            )
        finally:
            _release(photographs)

    def forget(self) -> None:
        if self._folder.exists():
            shutil.rmtree(self._folder)

    def close(self) -> None:
        self.forget()

    @property
    def _shard_samples(self) -> int:
        return -(-self.place.num_samples // len(self.place.shards))

    @property
    def _folder(self) -> Path:
        return Path(self.place.cache_folder, CACHE)


def environment(place: Place) -> dict[str, str]:
    """Variables with address and credentials of Swift's S3 API."""
    return {
        "S3_ENDPOINT_URL": place.endpoint,
        "AWS_ACCESS_KEY_ID": place.user,
        "AWS_SECRET_ACCESS_KEY": place.key,
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def _release(photographs: StreamingDataset) -> None:
    """Ends threads, and removes shared memory and locks.

    The library does this in an exit handler, and with a function that removes
    those of every process.
    """
    if hasattr(photographs, "_iterator"):
        photographs._iterator.exit()
    if hasattr(photographs, "_executor"):
        photographs._executor.shutdown()
    prefix = f"{photographs._shm_prefix_int:06}"
    for name in SHM_TO_CLEAN:
        try:
            memory = SharedMemory(f"{prefix}_{name}")
        except FileNotFoundError:
            continue
        memory.close()
        memory.unlink()
    for name in (BARRIER_FILELOCK, CACHE_FILELOCK):
        Path(tempfile.gettempdir(), f"{prefix}_{name}").unlink(missing_ok=True)
