"""How fast a core is just now, whoever else uses it.

``python -m benchmarks.speedometer``, started on a tier, does the same small
piece of work five times a second: it decodes a JPEG and multiplies matrices,
as both tiers do.  The CPU time of a piece says how dear all work on that core
is, for the speed of a machine that others share changes by more than 10 %
within minutes, and CPU seconds are then no measure of how much was done.

It takes about one per cent of the core, and says how much.
"""

from __future__ import annotations

import io
import statistics
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from benchmarks.remote import serve
from PIL import Image

PAUSE_SECONDS = 0.2
IMAGE_SIZE = (256, 192)
SMALL_SIZE = (32, 24)
QUALITY = 90
MATRIX = (64, 16)
COLUMNS = 12544
"""The product, 3 MB, does not fit the caches nearest to a core."""


@dataclass(frozen=True)
class ReadPlan:
    """One piece of work: when it began, and CPU seconds."""

    time: float
    seconds: float


@dataclass
class Speedometer:
    """Does its work on a thread of its own, as long as the process lives."""

    _readings: list[ReadPlan] = field(default_factory=list)

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def read(self, begin: float, end: float) -> dict[str, float]:
        """What pieces took that began between two times.

        Args:
            begin, end: of the monotonic clock, which all processes share.

        Returns:
            ``seconds`` of CPU time for a piece, in the median, and the
            ``used`` part of the core.

        Raises:
            ValueError: when no piece was done.
        """
        return summary(self._readings, begin, end)

    def _run(self) -> None:
        work = SpanSlice()
        while True:
            began, before = time.monotonic(), time.thread_time()
            work.do()
            spent = time.thread_time() - before
            self._readings.append(ReadPlan(began, spent))
            time.sleep(PAUSE_SECONDS)


class SpanSlice:
    """The same work each time."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        width, height = SMALL_SIZE
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        file = io.BytesIO()
        image = Image.fromarray(pixels).resize(IMAGE_SIZE)
        image.save(file, "JPEG", quality=QUALITY)
        self._jpeg = file.getvalue()
        self._weights = random.random(MATRIX, dtype=np.float32)
        self._inputs = random.random((MATRIX[1], COLUMNS), dtype=np.float32)

    def do(self) -> None:
        with Image.open(io.BytesIO(self._jpeg)) as image:
            image.load()
        np.maximum(self._weights @ self._inputs, 0.5)


def summary(
    readings: Sequence[ReadPlan], begin: float, end: float
) -> dict[str, float]:
    """As :meth:`Speedometer.read` returns it.

    Args:
        readings: in the order of time.
        begin, end: seconds.
    """
    first, last = (
        bisect_left(readings, moment, key=lambda each: each.time)
        for moment in (begin, end)
    )
    seconds = [each.seconds for each in readings[first:last]]
    if not seconds:
        raise ValueError(
            f"no reading of the speed in {end - begin:.1f} s; one comes"
            f" every {PAUSE_SECONDS} s on a core that has time for it"
        )
    return {
        "seconds": statistics.median(seconds),
        "used": sum(seconds) / (end - begin),
    }


def main() -> None:
    speedometer = Speedometer()
    speedometer.start()
    serve({"read": speedometer.read})


if __name__ == "__main__":
    main()
