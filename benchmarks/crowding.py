"""What a core loses while another one works; imports nothing of HAPI.

Cores of one machine are not machines of their own: they share caches, memory,
power, and often two of a virtual machine are one of metal.  Two tiers that
are both at work are then slower than each of them alone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from benchmarks.pieces import built
from benchmarks.pinned import one_core
from benchmarks.preset import Preset
from benchmarks.remote import Remote, serve
from benchmarks.spread import Spread, spread
from benchmarks.tight_loop import jpegs_of
from benchmarks.workloads import NETWORKS
from torchvision.io import ImageReadMode, decode_jpeg

ROOT = Path(__file__).resolve().parent.parent
ANSWER_SECONDS = 120.0


class Batches:
    """Decodes photographs and passes them through a network.

    Args:
        name: of :data:`benchmarks.workloads.NETWORKS`.
        jpegs: of which a batch is taken, repeated if they are too few.
    """

    def __init__(self, name: str, jpegs: Sequence[bytearray]) -> None:
        network = NETWORKS[name]
        count = -(-network.batch_size // len(jpegs))
        self._jpegs = [*jpegs] * count
        self._batch_size = network.batch_size
        self._preset = Preset(network.resize_size, network.crop_size)
        self._model = built(name).eval()

    def run(self) -> None:
        """One batch."""
        images = [
            self._preset(
                decode_jpeg(
                    torch.frombuffer(jpeg, dtype=torch.uint8),
                    ImageReadMode.RGB,
                )
            )
            for jpeg in self._jpegs[: self._batch_size]
        ]
        with torch.inference_mode():
            self._model(torch.stack(images))


def crowding(
    name: str, tar: Path, *, rounds: int, steps: int
) -> Spread | None:
    """Seconds of work while another core does the same, over those alone.

    Args:
        name: of the network.
        tar: of photographs.
        rounds: that count; in each, both are measured.
        steps: batches of each.

    Returns:
        CPU seconds over CPU seconds, less one: 0.1 is ten per cent longer;
        None where this process may use one core only.

    Raises:
        RemoteError: when the other process ends, or does not answer.
    """
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        return None
    batches = Batches(name, jpegs_of(str(tar)))

    def seconds() -> float:
        started = time.thread_time()
        for _ in range(steps):
            batches.run()
        return time.thread_time() - started

    ratios = []
    with (
        one_core() as core,
        _neighbour(name, tar, min(cores - {core})) as beside,
    ):
        seconds()
        for _ in range(rounds):
            beside.ask("rest", seconds=ANSWER_SECONDS)
            alone = seconds()
            beside.ask("work", seconds=ANSWER_SECONDS)
            ratios.append(seconds() / alone - 1)
    return spread(ratios)


@contextlib.contextmanager
def _neighbour(name: str, tar: Path, core: int) -> Iterator[Remote]:
    """A process on another core that works when it is told to."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, name, str(tar), str(core)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    with Remote(process, f"the process beside, on core {core}") as remote:
        yield remote


class Neighbour:
    """What that process does.

    Args:
        batches: its work.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._at_rest = threading.Event()
        self._thread: threading.Thread | None = None

    def work(self) -> None:
        """From the first batch of many on, until it is to rest."""
        self.rest()
        self._batches.run()
        self._at_rest.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def rest(self) -> None:
        """Returns when nothing is done any more."""
        self._at_rest.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._at_rest.is_set():
            self._batches.run()


def main(name: str, tar: str, core: str) -> None:
    os.sched_setaffinity(0, {int(core)})
    torch.set_num_threads(1)
    neighbour = Neighbour(Batches(name, jpegs_of(tar)))
    serve({"work": neighbour.work, "rest": neighbour.rest})


if __name__ == "__main__":
    main(*sys.argv[1:])
