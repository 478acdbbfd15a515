"""The webdataset library, on the tar shards.

It reads each URL with ``curl``, as its documentation recommends.  The token is
in a file, so that no process list shows it.
"""

from __future__ import annotations

import random
import shlex
import tempfile
from typing import Any, ClassVar

import webdataset

from benchmarks.opponents.opponent import Batches, Opponent
from benchmarks.opponents.training import Options, collate, log_in


class WebDataset(Opponent):
    """Collates batches in the workers, as its documentation advises."""

    PACKAGES: ClassVar = ("webdataset",)
    GRID: ClassVar[list[Options]] = [
        {"num_workers": 0, "channels_last": True},
        {"num_workers": 1, "channels_last": True},
        {"num_workers": 2, "channels_last": True},
        {"num_workers": 0, "channels_last": False},
    ]

    def batches(self, epoch: int) -> Batches:
        with tempfile.NamedTemporaryFile("w") as header:
            yield from self._loader(epoch, header)

    def _loader(self, epoch: int, header: Any) -> webdataset.WebLoader:
        url, token = log_in(self.place)
        header.write(f"X-Auth-Token: {token}\n")
        header.flush()
        shards = list(self.place.shards)
        random.Random(epoch).shuffle(shards)
        read = ["exec", "curl", "-fsL", "--header", f"@{header.name}"]
        container = f"{url}/{self.place.container}"
        urls = [
            f"pipe:{shlex.join([*read, f'{container}/{shard}'])}"
            for shard in shards
        ]
        samples = (
            webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
            .to_tuple("jpg", "cls")
            .map_tuple(self.decode, int)
            .batched(self.task.batch_size, collation_fn=collate)
        )
        return webdataset.WebLoader(
            samples, batch_size=None, num_workers=self.options["num_workers"]
        )
