"""Profiles the client's device and CPU on a few real samples."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.planning.sample_probe import (
    BUDGET_SECONDS,
    ENCODING_SECONDS,
    SAMPLES_PER_SPAN,
    ProbeSamples,
    logger,
)
from hapi_protocol.errors import ClientError, DoesNotFitError
from hapi_protocol.feature_reader import read_features
from hapi_protocol.feature_stream import Row, feature_schema
from hapi_protocol.feature_writer import FeatureStreamWriter
from hapi_protocol.profiles import ModelProfile
from hapi_protocol.samples import SampleError
from hapi_splitter.encodings import decode, encode
from hapi_splitter.host_limits import allowed_cores, allowed_memory_bytes
from hapi_splitter.planner.costs import CutFacts, SampleCosts, candidate_cuts
from hapi_splitter.planner.problem import Route
from hapi_splitter.profiling.node_timer import prefix_outputs
from hapi_splitter.profiling.profiler import profile_model


@dataclass(frozen=True)
class LocalFacts:
    """Measurements of the client.

    Attributes:
        cuts: all cuts of the frozen region.
        samples: sizes and CPU times of a sample.
        client: profile of the client's device.
        num_probed: number of samples that were measured.
        skipped: candidate cuts that were left out for lack of time.
    """

    cuts: tuple[CutFacts, ...]
    samples: SampleCosts
    client: ModelProfile
    num_probed: int
    skipped: tuple[int, ...] = ()


def measure(
    region: FrozenRegion,
    probe: ProbeSamples,
    encodings: Callable[[str], Sequence[str]],
    cuts: Sequence[int] = (),
) -> LocalFacts:
    """Measures samples and the client's device.

    Args:
        region: frozen region of the model.
        probe: samples to decode.
        encodings: returns canonical texts of the encodings to measure, from
            the dtype of a cut.
        cuts: cuts to measure in addition to the candidates.

    Raises:
        ClientError: ``bad_sample`` if none of the samples can be decoded.
        DoesNotFitError: if the device has too little memory.
    """
    try:
        return _measure(region, probe, encodings, cuts)
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise DoesNotFitError(
            "does_not_fit",
            "this device has too little free memory to measure the frozen "
            f"layers on {region.forward_samples} samples: {error}; use "
            "another device, or cut='freeze', which computes all frozen "
            "layers in the store",
        ) from error


def _measure(
    region: FrozenRegion,
    probe: ProbeSamples,
    encodings: Callable[[str], Sequence[str]],
    cuts: Sequence[int],
) -> LocalFacts:
    facts = region.device_graph.cuts
    decoded, decode_seconds = _decode(region, probe)
    chosen = set(candidate_cuts(facts, probe.bytes_each)) | set(cuts)
    features = _features(region, decoded, sorted(chosen))
    wire_bytes: dict[Route, float] = {}
    encode_seconds, unpack_seconds = {}, {}
    deadline = time.monotonic() + ENCODING_SECONDS
    skipped = []
    # The whole frozen region first, as others are compared with it; then by
    # size, because large features are the smallest loss if time runs out.
    for cut in sorted(
        chosen, key=lambda cut: (cut != len(facts), features[cut].nbytes)
    ):
        if wire_bytes and not cuts and time.monotonic() > deadline:
            skipped.append(cut)
            continue
        for encoding in encodings(facts[cut - 1].dtype):
            route = Route(cut, encoding)
            (
                wire_bytes[route],
                encode_seconds[route],
                unpack_seconds[route],
            ) = _measure_encoding(features[cut], encoding)
    return LocalFacts(
        cuts=facts,
        samples=SampleCosts(
            raw_bytes=probe.bytes_each,
            decode_seconds=decode_seconds,
            wire_bytes=wire_bytes,
            encode_seconds=encode_seconds,
            unpack_seconds=unpack_seconds,
            span_samples=probe.span_samples,
        ),
        client=profile_device(region),
        num_probed=len(decoded),
        skipped=tuple(sorted(skipped)),
    )


def _features(
    region: FrozenRegion, samples: torch.Tensor, cuts: Sequence[int]
) -> dict[int, torch.Tensor]:
    """Returns the features at each cut, on the CPU."""
    parts = [
        prefix_outputs(region.device_graph, part.to(region.device), cuts)
        for part in torch.split(samples, region.forward_samples)
    ]
    # The plan's encoding time is that of one CPU core.
    return {
        cut: torch.cat([part[cut] for part in parts]).cpu() for cut in cuts
    }


def profile_device(region: FrozenRegion) -> ModelProfile:
    """Profiles the client's device at its batch size."""
    profile = profile_model(
        region.device_graph,
        region.device,
        cores=allowed_cores(),
        memory_limit_bytes=memory_bytes(region.device),
        batches=(region.forward_samples,),
        budget_seconds=BUDGET_SECONDS,
    )
    # The profile has just run, so this much memory is available.
    min_bytes = profile.peak_bytes[-1]
    return replace(
        profile, memory_limit_bytes=max(profile.memory_limit_bytes, min_bytes)
    )


def memory_bytes(device: torch.device) -> int:
    """Returns the device memory that the job has or may allocate."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device))
    allowed = allowed_memory_bytes()
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return min(allowed, 1024 * int(line.split()[1]))
    return allowed  # not Linux


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Has torch compute in this thread, whose CPU time is counted."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _decode(
    region: FrozenRegion, probe: ProbeSamples
) -> tuple[torch.Tensor, float]:
    """Returns the samples that can be decoded, and core-seconds of one."""
    decoded = []
    seconds = 0.0
    failure = f"one {probe.missing_message}"
    with _one_thread():
        for data in probe.members[:1]:
            with contextlib.suppress(SampleError):  # logged below
                region.decode(data)  # warm-up
        for data in probe.members:
            started = time.thread_time()
            try:
                decoded.append(region.decode(data))
            except SampleError as error:
                logger.info("cannot decode a sample to measure: %s", error)
                failure = str(error)
                continue
            seconds += time.thread_time() - started
    if not decoded:
        raise ClientError(
            "bad_sample",
            "none of the samples to measure can be decoded; check the "
            f"{region.transform.medium.name}s ({failure}), or use "
            "cut='stream', which measures nothing",
        )
    return torch.stack(decoded), seconds / len(decoded)


def _measure_encoding(
    features: torch.Tensor, encoding: str
) -> tuple[float, float, float]:
    """Returns bytes and core-seconds to encode and to decode, per sample."""
    with _one_thread():
        _encode_and_decode(features, encoding)  # warm-up
        return _encode_and_decode(features, encoding)


def _encode_and_decode(
    features: torch.Tensor, encoding: str
) -> tuple[float, float, float]:
    count = len(features)
    sink = io.BytesIO()
    started = time.thread_time()
    writer = FeatureStreamWriter(
        sink, feature_schema(features.shape[1:], encoding)
    )
    header_bytes = sink.tell()
    # A batch has neighbours only, as in a real stream: compression depends
    # on their similarity.
    for part in torch.split(features, SAMPLES_PER_SPAN):
        encoded = encode(part, encoding)
        rows = [Row(number, str(number)) for number in range(len(part))]
        writer.write(
            rows, encoded.array, scale=encoded.scale, zero=encoded.zero
        )
    body_bytes = sink.tell() - header_bytes
    writer.close(source_etag="", source_bytes=0)
    written = time.thread_time()
    sink.seek(0)
    for batch in read_features(sink):
        assert batch.features is not None, "a stream of features"
        decode(batch.features, encoding, batch.scale, batch.zero)
    unpacked = time.thread_time()
    return (
        body_bytes / count,
        (written - started) / count,
        (unpacked - written) / count,
    )
