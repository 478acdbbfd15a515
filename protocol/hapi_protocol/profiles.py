"""Cost of a model's frozen region on one device.

The worker answers an ``X-Hapi-Profile`` request with a profile, and the
client measures one of its own device: the planner compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hapi_protocol.json_messages import JsonMessage, PossiblyEmpty

MAX_PROFILE_BYTES = 16 * 1024 * 1024
"""Maximum length of a profile's body: 20,000 cuts, the most of a package, with
four batch sizes and numbers of 20 digits take 2 MB."""


@dataclass(frozen=True)
class BatchProfile:
    """Seconds of one instrumented forward pass.

    Attributes:
        batch: number of samples in the pass.
        cut_seconds: ``[num_cuts + 1]``, cumulative wall seconds from the
            input to each cut; ``cut_seconds[0]`` is 0.
    """

    batch: int
    cut_seconds: tuple[float, ...]


@dataclass(frozen=True)
class ModelProfile(JsonMessage):
    """Seconds and memory of a frozen region on the client or in storage.

    Attributes:
        digest: sha256 of the package, hexadecimal.
        numerics_tag: numerics class, versions and device kind.
        device: kind of device, ``cpu`` or ``cuda``.
        device_name: name of the device, for people.
        num_devices: number of forward passes that can run concurrently.
        cores: cores for decoding, encoding and, on a CPU, the forward pass.
        forward_threads: cores of one forward pass; 0 on an accelerator.
        batches: at least one, ascending by batch.
        reference_seconds: core-seconds to decode and transform the reference
            image; see ``hapi_splitter.profiling.profiler``.
        load_seconds: seconds to check and load the package; 0 if unknown.
        parameter_bytes: size of the region's weights.
        memory_limit_bytes: memory for weights and forward passes on the
            device.
        peak_bytes: ``[num_cuts + 1]``, peak memory of a forward pass of one
            sample to each cut, including weights.
    """

    NAME = "model profile"
    MAX_BYTES = MAX_PROFILE_BYTES

    digest: str
    numerics_tag: str
    device: str
    device_name: PossiblyEmpty
    num_devices: int
    cores: float
    forward_threads: int
    batches: tuple[BatchProfile, ...]
    reference_seconds: float
    load_seconds: float
    parameter_bytes: int
    memory_limit_bytes: int
    peak_bytes: tuple[int, ...]

    @property
    def num_cuts(self) -> int:
        """Number of cuts; the last one follows the whole region."""
        return len(self.peak_bytes) - 1

    def best(self) -> BatchProfile:
        """The batch with the fewest seconds per sample of the region."""
        return min(self.batches, key=lambda b: b.cut_seconds[-1] / b.batch)

    def seconds_per_sample(self, cut: int) -> float:
        """Wall seconds per sample of the pass to a cut, at the best batch."""
        best = self.best()
        return best.cut_seconds[cut] / best.batch

    def check(self) -> None:
        """Raises ValueError if a value would break the planner."""
        if not self.batches or min(row.batch for row in self.batches) == 0:
            raise ValueError("no batches, or an empty one")
        if not self.cores or not self.num_devices:
            raise ValueError("no cores or no devices")
        for row in self.batches:
            seconds = row.cut_seconds
            if len(seconds) != len(self.peak_bytes) or not seconds:
                raise ValueError("cut_seconds and peak_bytes differ in length")
            if seconds[0] != 0 or any(a > b for a, b in pairwise(seconds)):
                raise ValueError("cut_seconds does not ascend from 0")
