"""Estimates the client's costs from what a short job has done anyway.

Measuring stops the training loop for some seconds, which a short job does not
recover.  It plans with what its first window shows: decoding and layers of
raw reads.  The time of layers is divided among the cuts by their operations,
and encodings are those without compression, whose sizes are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hapi_client.metrics.events import WindowMetrics
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.planning.cost_estimators import LINK_LIMITED_SHARE
from hapi_client.planning.device_profile import (
    LocalFacts,
    memory_bytes,
)
from hapi_protocol.data_index import Span
from hapi_protocol.encodings import Encoding
from hapi_protocol.profiles import BatchProfile, ModelProfile
from hapi_splitter.host_limits import allowed_cores
from hapi_splitter.numerics import numerics_tag
from hapi_splitter.planner.costs import SampleCosts, candidate_cuts
from hapi_splitter.planner.problem import RAW_ROUTE, Route

# Measured on one core (AMD EPYC) for features of 50 to 800 kB, float32 and
# float16: 0.2 to 2e-9.  Features of 4 kB take more for a byte, 0.06 ms in all.
COPY_SECONDS_PER_BYTE = 1e-9
"""Core-seconds of encoding or unpacking without compression."""


def observed_facts(
    region: FrozenRegion,
    window: WindowMetrics | None,
    encodings: Callable[[str], Sequence[str]],
    spans: Sequence[Span],
    reference_seconds: float,
) -> LocalFacts | None:
    """Returns the client's costs in a window of raw reads.

    Args:
        region: frozen region of the model.
        window: sums of the window; None for costs of 0.
        encodings: returns encodings that a plan may use, from the dtype of
            a cut.
        spans: spans of the data set.
        reference_seconds: core-seconds to decode and transform the reference
            image (:mod:`hapi_splitter.inputs.reference_image`).

    Returns:
        None if the window does not show them, or the device computes
        asynchronously.
    """
    decoding = layers = 0.0
    num_computed = 0
    if window is not None:
        num_decoded = window.samples.get(RAW_ROUTE, 0)
        num_computed = window.layers.samples_by_cut.get(0, 0)
        if region.device.type != "cpu" or not num_decoded or not num_computed:
            return None
        decoding = window.raw.decode_cpu_seconds / num_decoded
        layers = window.layers.cpu_seconds / num_computed
    num_samples = sum(len(span.rows) for span in spans)
    num_bytes = sum(span.byte_range.length_bytes for span in spans)
    raw_bytes = num_bytes / num_samples
    cuts = region.device_graph.cuts
    all_flops = max(1, cuts[-1].flops)
    seconds = (0.0, *(layers * cut.flops / all_flops for cut in cuts))
    sizes = {
        Route(cut, encoding): float(
            Encoding.parse(encoding).sample_bytes(cuts[cut - 1].shape)
        )
        for cut in candidate_cuts(cuts, raw_bytes)
        for encoding in encodings(cuts[cut - 1].dtype)
        if Encoding.parse(encoding).compression == "none"
    }
    copying = {
        route: COPY_SECONDS_PER_BYTE * size for route, size in sizes.items()
    }
    return LocalFacts(
        cuts=cuts,
        samples=SampleCosts(
            raw_bytes=raw_bytes,
            decode_seconds=decoding,
            wire_bytes=sizes,
            encode_seconds=copying,
            unpack_seconds=copying,
            span_samples=num_samples / len(spans),
        ),
        client=ModelProfile(
            digest=region.digest,
            numerics_tag=numerics_tag("cpu"),
            device="cpu",
            device_name="",
            num_devices=1,
            cores=allowed_cores(),
            forward_threads=torch.get_num_threads(),
            batches=(BatchProfile(1, seconds),),
            reference_seconds=reference_seconds,
            load_seconds=0.0,
            parameter_bytes=region.parameter_bytes,
            memory_limit_bytes=memory_bytes(region.device),
            peak_bytes=(0,) * len(seconds),
        ),
        num_probed=num_computed,
    )


def sample_seconds(window: WindowMetrics, num_samples: int) -> float:
    """Returns the time per sample that a first window shows.

    The loop starts within the window, and has used fewer samples than later
    in the same time.  So it is no longer than all the work on a sample, one
    step after the other, unless reading takes most of the time.

    Args:
        window: the window.
        num_samples: samples that the loop has taken in it.
    """
    seconds = window.seconds / num_samples
    num_decoded = window.samples.get(RAW_ROUTE, 0)
    num_computed = window.layers.samples_by_cut.get(0, 0)
    if (
        window.reading_share > LINK_LIMITED_SHARE
        or not num_decoded
        or not num_computed
        or not window.training.samples
    ):
        return seconds
    work = (
        window.raw.decode_cpu_seconds / num_decoded
        + window.layers.cpu_seconds / num_computed
        + window.training.seconds / window.training.samples
    )
    return min(seconds, work)
