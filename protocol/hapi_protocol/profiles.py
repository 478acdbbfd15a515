"""What the frozen region of one model costs on one tier's device.

The worker answers an ``X-Hapi-Profile`` request with it, and the client
makes one of its own device: the planner compares the two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from hapi_protocol.errors import AnnotationError
from hapi_protocol.summary import check_amount
from hapi_protocol.versions import API_VERSION, check_worker_version

MAX_PROFILE_BYTES = 16 * 1024 * 1024
"""A longer profile is not one of ours."""


@dataclass(frozen=True)
class BatchProfile:
    """One instrumented pass, node by node.

    Attributes:
        batch: samples of the forward.
        cut_seconds: ``[num_cuts + 1]``, cumulative wall seconds of one
            forward of ``batch`` samples from the input to each cut;
            ``cut_seconds[0]`` is 0.
    """

    batch: int
    cut_seconds: tuple[float, ...]


@dataclass(frozen=True)
class ModelProfile:
    """Seconds and memory of a frozen region on one tier.

    Attributes:
        digest: sha256 of the package, hexadecimal.
        numerics_tag: class, versions and device kind.
        device: kind of device, ``cpu`` or ``cuda``.
        device_name: for people.
        num_devices: forwards that run at the same time.
        cores: that the tier has for decoding, encoding and, on a CPU
            device, the forward.
        forward_threads: cores that one forward takes; 0 on an
            accelerator.
        batches: ascending by batch, at least one.
        reference_seconds: core-seconds to decode and transform the
            reference image; see ``hapi_splitter.profiling.profiler``.
        load_seconds: to check and load the package, 0 if not known.
        parameter_bytes: of the region's weights.
        memory_limit_bytes: for weights and forward passes on the device.
        peak_bytes: ``[num_cuts + 1]``, bytes that a forward of one sample
            to each cut needs at its peak, weights included.
    """

    digest: str
    numerics_tag: str
    device: str
    device_name: str
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
        """The last one lies behind the whole region."""
        return len(self.peak_bytes) - 1

    def best(self) -> BatchProfile:
        """The batch with the least seconds per sample for the region."""
        return min(self.batches, key=lambda b: b.cut_seconds[-1] / b.batch)

    def seconds_per_sample(self, cut: int) -> float:
        """Wall seconds of the forward to a cut, at the best batch."""
        best = self.best()
        return best.cut_seconds[cut] / best.batch

    def to_body(self) -> bytes:
        """As JSON."""
        return json.dumps({**asdict(self), "version": API_VERSION}).encode()

    @classmethod
    def from_body(cls, body: bytes) -> ModelProfile:
        """
        Raises:
            AnnotationError: ``bad_request``, naming what is wrong.
        """
        try:
            fields = json.loads(body)
            return cls._from_fields(fields)
        except (
            ValueError,
            KeyError,
            TypeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise AnnotationError(
                "bad_request", f"this is no profile of a model: {error!r}"
            ) from error

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Any]) -> ModelProfile:
        check_worker_version(fields["version"], "a profile")
        batches = tuple(
            BatchProfile(
                int(each["batch"]), tuple(map(float, each["cut_seconds"]))
            )
            for each in fields["batches"]
        )
        peak_bytes = tuple(map(int, fields["peak_bytes"]))
        lengths = {len(each.cut_seconds) for each in batches}
        if lengths != {len(peak_bytes)}:
            raise ValueError("lists of different lengths")
        found = cls(
            digest=str(fields["digest"]),
            numerics_tag=str(fields["numerics_tag"]),
            device=str(fields["device"]),
            device_name=str(fields["device_name"]),
            num_devices=int(fields["num_devices"]),
            cores=float(fields["cores"]),
            forward_threads=int(fields["forward_threads"]),
            batches=batches,
            reference_seconds=float(fields["reference_seconds"]),
            load_seconds=float(fields["load_seconds"]),
            parameter_bytes=int(fields["parameter_bytes"]),
            memory_limit_bytes=int(fields["memory_limit_bytes"]),
            peak_bytes=peak_bytes,
        )
        found._check()
        return found

    def _check(self) -> None:
        """A worker of another kind must not break the planner."""
        amounts = (
            self.cores,
            self.num_devices,
            *(each.batch for each in self.batches),
        )
        if min(amounts) <= 0 or not all(map(math.isfinite, amounts)):
            raise ValueError("no cores, no devices or an empty batch")
        for name in (
            "forward_threads",
            "reference_seconds",
            "load_seconds",
            "parameter_bytes",
            "memory_limit_bytes",
        ):
            check_amount(getattr(self, name), name)
        for each in self.batches:
            seconds = each.cut_seconds
            check_amount(seconds[-1], "cut_seconds")
            if seconds[0] != 0 or any(a > b for a, b in pairwise(seconds)):
                raise ValueError("cut_seconds that do not grow from 0")
