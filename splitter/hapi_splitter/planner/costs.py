"""Computes each option's use of each resource from measurements.

Costs are per sample: bytes on the link, core-seconds, device-seconds. Swift's
own core-seconds count for ``server cpu``, because Swift runs on the same
hosts. Factors learned during training correct each cost component separately
(:mod:`hapi_splitter.planner.resource_use`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from hapi_protocol.data_index import MAX_SPAN_SAMPLES
from hapi_protocol.encodings import allowed_encodings
from hapi_protocol.profiles import ModelProfile
from hapi_splitter.planner.problem import (
    CLIENT_CPU,
    CLIENT_DEVICE,
    LINK,
    RAW,
    RESOURCES,
    SERVER_CPU,
    SERVER_DEVICE,
    UNITS,
    Option,
    Problem,
    Resource,
    Route,
    StartupCost,
)
from hapi_splitter.planner.resource_use import (
    CLIENT_DECODING,
    CLIENT_HANDLING,
    CLIENT_LAYERS,
    KINDS,
    SERVER_DECODING,
    SERVER_LAYERS,
    SERVING,
    TRAINING,
    resource_use,
    scaled,
)

DEFAULT_SERVE_SECONDS_PER_BYTE = 1 / 350e6
"""Core-seconds of Swift per byte of a large object.

Measured with Swift 2.38: proxy and object server together read 340 to 360 MB/s
on one core, for GETs of 50 and 100 MB from a replicated policy on a memory
file system. Erasure coding, TLS and encryption cost more."""
DEFAULT_SERVE_SECONDS_PER_REQUEST = 0.0057
"""Core-seconds of Swift per raw GET of any length.

Measured for GETs of 4, 16 and 64 photographs of 108 kB, without the cost of
their bytes."""
DEFAULT_PUSH_SECONDS_PER_REQUEST = 0.0124
"""Core-seconds of Swift per annotated GET, which includes authorisation of the
model and the exchange with the worker.  Jobs replace it by what they observe;
how it was measured is not recorded."""

_CPU = "cpu"
_MAX_REDUCTION = 8
"""Largest reduction by an encoding: uint8 has a quarter of float32's bytes,
and compression of sparse features halves them again."""
_NEAR_HULL = 1.1
"""Candidates are at most this factor above the convex hull.  Chosen, not
measured: a larger one costs measurements of more cuts, which then rarely
win."""
_EQUAL_FLOPS = 0.01
"""Cuts that differ by a smaller fraction of all operations count as equal.
Chosen, not measured: activations and pooling, which are meant, have less."""


@dataclass(frozen=True)
class CutFacts:
    """Properties of a cut that the planner uses.

    Attributes:
        index: number of the cut, from 1.
        name: module in the user's model, for people.
        op: operator that yields the tensor.
        shape: shape of one sample.
        float32_bytes: size of one sample in float32.
        flops: floating-point operations per sample from the input to the cut.
        dtype: in which the tensor is computed.
    """

    index: int
    name: str
    op: str
    shape: tuple[int, ...]
    float32_bytes: int
    flops: int
    dtype: str = "float32"


@dataclass(frozen=True)
class SampleCosts:
    """Average costs of one sample, measured by the client on real samples.

    Attributes:
        raw_bytes: size in the shard, including headers of tar members.
        decode_seconds: core-seconds of the client for decode and transform.
        wire_bytes: size in the Arrow stream, by cut and encoding.
        encode_seconds: core-seconds of encoding on the *client's* CPU.
        unpack_seconds: core-seconds of the client from Arrow to float32.
        span_samples: samples per request.
    """

    raw_bytes: float
    decode_seconds: float
    wire_bytes: Mapping[Route, float]
    encode_seconds: Mapping[Route, float]
    unpack_seconds: Mapping[Route, float]
    span_samples: float = MAX_SPAN_SAMPLES


@dataclass(frozen=True)
class Conditions:
    """Conditions that change during training.

    Attributes:
        link_bytes_per_second: bandwidth of all the job's connections.
        server_share: the job's fraction of the workers' capacity, 0 to 1.
        num_workers: workers that serve the job, all like the profiled one.
        train_seconds: device-seconds of the training loop per sample, in
            sequence with the client's forward passes.
        handling_seconds: client overhead, core-seconds per sample.
        serve_seconds_per_byte: Swift's core-seconds per byte read or sent.
        serve_seconds_per_request: Swift's core-seconds per raw GET.
        push_seconds_per_request: Swift's core-seconds per annotated GET.
        scale: ratio of observed and profiled cost, by cost component; the
            default is 1.
    """

    link_bytes_per_second: float
    server_share: float = 1.0
    num_workers: int = 1
    train_seconds: float = 0.0
    handling_seconds: float = 0.0
    serve_seconds_per_byte: float = DEFAULT_SERVE_SECONDS_PER_BYTE
    serve_seconds_per_request: float = DEFAULT_SERVE_SECONDS_PER_REQUEST
    push_seconds_per_request: float = DEFAULT_PUSH_SECONDS_PER_REQUEST
    scale: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.server_share <= 1:
            raise ValueError(
                f"server_share must be from 0 to 1, not {self.server_share}"
            )
        for name in self.scale:
            if name not in KINDS:
                raise ValueError(
                    f"{name!r} is not a cost component; there are "
                    f"{', '.join(KINDS)}"
                )

    @property
    def server_capacity(self) -> float:
        """Capacity that the job gets, as a multiple of one worker's."""
        return self.server_share * self.num_workers


def candidate_cuts(
    cuts: Sequence[CutFacts], raw_bytes: float
) -> tuple[int, ...]:
    """Returns the cuts that are worth measuring, ascending.

    Candidates are smaller than all cuts before them and near the lower convex
    hull of bytes over floating-point operations, because a mix of two cuts on
    the hull is as good as a cut above it. Of cuts with equal bytes and nearly
    equal work the last is taken: a ReLU after a convolution leaves zeros,
    which compress. The best encoding must be able to make a candidate smaller
    than the image. The smallest and the last cut are always included.

    Args:
        cuts: all cuts, first to last.
        raw_bytes: size of the average image, cut 0.
    """
    if not cuts:
        return ()
    last = cuts[-1]
    distinct = [
        cut
        for cut, following in pairwise(cuts)
        if following.float32_bytes != cut.float32_bytes
        or following.flops - cut.flops > _EQUAL_FLOPS * last.flops
    ]
    distinct.append(last)
    smallest = min(distinct, key=lambda cut: cut.float32_bytes)
    hull = _lower_hull(
        (cut.flops, cut.float32_bytes / _MAX_REDUCTION) for cut in distinct
    )
    chosen = {smallest.index, last.index}
    below = raw_bytes
    for cut in distinct:
        size = cut.float32_bytes / _MAX_REDUCTION
        height = np.interp(
            cut.flops, [x for x, _ in hull], [y for _, y in hull]
        )
        if size < below and size <= _NEAR_HULL * height:
            chosen.add(cut.index)
        below = min(below, size)
    return tuple(sorted(chosen))


def build_problem(
    cuts: Sequence[CutFacts],
    server: ModelProfile,
    client: ModelProfile,
    samples: SampleCosts,
    conditions: Conditions,
    *,
    min_precision: str,
    num_samples: int,
    epochs: float,
    startup: StartupCost,
) -> Problem:
    """Builds the planner's problem.

    Args:
        cuts: all cuts, first to last.
        server: profile of the worker's tier.
        client: profile of the client's tier, of the same package.
        samples: keys of ``wire_bytes`` become options if ``min_precision``
            allows their encodings.
        conditions: current conditions.
        min_precision: precision floor, one of
            :data:`hapi_protocol.encodings.PRECISIONS`.
        num_samples: size of the data set.
        epochs: remaining epochs.
        startup: startup costs of push-down.

    Raises:
        ValueError: if profiles have other cuts, a measurement is missing or
            the precision is unknown.
    """
    _check_profiles(cuts, server, client)
    costs = _Costs(server, client, samples, conditions)
    options = [costs.streaming()]
    for cut, encoding in sorted(samples.wire_bytes):
        if not 1 <= cut <= len(cuts):
            raise ValueError(
                f"cut {cut} was measured, the region has 1 to {len(cuts)}"
            )
        dtype = cuts[cut - 1].dtype
        if encoding in allowed_encodings(min_precision, dtype):
            options.append(costs.pushed(cut, encoding))
    return Problem(
        resources=_resources(server, client, conditions),
        options=tuple(options),
        num_samples=num_samples,
        epochs=epochs,
        startup=startup,
        server_limit_bytes=server.memory_limit_bytes,
        client_limit_bytes=client.memory_limit_bytes,
        last_cut=len(cuts),
        server_threads=layer_threads(server),
        client_threads=layer_threads(client),
    )


@dataclass(frozen=True)
class _Costs:
    """Builds options from measurements."""

    server: ModelProfile
    client: ModelProfile
    samples: SampleCosts
    conditions: Conditions

    def streaming(self) -> Option:
        samples, conditions = self.samples, self.conditions
        work = {
            SERVING: self._serving(
                samples.raw_bytes, conditions.serve_seconds_per_request
            ),
            CLIENT_DECODING: samples.decode_seconds,
            **self._in_client(0),
        }
        return self._option(
            0, RAW, samples.raw_bytes, work, 0, self.client.peak_bytes[-1]
        )

    def pushed(self, cut: int, encoding: str) -> Option:
        samples, server = self.samples, self.server
        route = Route(cut, encoding)
        wire_bytes = samples.wire_bytes[route]
        work = {
            SERVING: self._serving(
                samples.raw_bytes + wire_bytes,
                self.conditions.push_seconds_per_request,
            ),
            SERVER_DECODING: self._on_server(
                samples.decode_seconds
                + _measured(samples.encode_seconds, route, "encoding")
            ),
            SERVER_LAYERS: server.seconds_per_sample(cut),
            CLIENT_DECODING: _measured(
                samples.unpack_seconds, route, "unpacking"
            ),
            **self._in_client(cut),
        }
        # From an inner cut the client needs at most the memory of the whole
        # region; after the last cut none of it runs on the client.
        inner = cut < server.num_cuts
        return self._option(
            cut,
            encoding,
            wire_bytes,
            work,
            server.peak_bytes[cut],
            self.client.peak_bytes[-1] if inner else 0,
        )

    def _option(
        self,
        cut: int,
        encoding: str,
        link_bytes: float,
        work: Mapping[str, float],
        server_bytes: int,
        client_bytes: int,
    ) -> Option:
        work = scaled(work, self.conditions.scale)
        use = resource_use(
            link_bytes,
            work,
            server_share=self.conditions.server_capacity,
            server_threads=layer_threads(self.server),
            client_threads=layer_threads(self.client),
        )
        return Option(cut, encoding, use, server_bytes, client_bytes, work)

    def _in_client(self, cut: int) -> dict[str, float]:
        """Returns client components other than decoding."""
        client, conditions = self.client, self.conditions
        layers = client.seconds_per_sample(
            client.num_cuts
        ) - client.seconds_per_sample(cut)
        return {
            CLIENT_LAYERS: max(0.0, layers),
            CLIENT_HANDLING: conditions.handling_seconds,
            TRAINING: conditions.train_seconds,
        }

    def _serving(self, num_bytes: float, request_seconds: float) -> float:
        """Returns core-seconds of Swift."""
        return (
            num_bytes * self.conditions.serve_seconds_per_byte
            + request_seconds / self.samples.span_samples
        )

    def _on_server(self, client_core_seconds: float) -> float:
        """Converts core-seconds of the client to those of the server."""
        ratio = self.server.reference_seconds / self.client.reference_seconds
        return client_core_seconds * ratio


def layer_threads(profile: ModelProfile) -> int:
    """Returns the cores that a forward pass uses; 0 on an accelerator."""
    return profile.forward_threads if profile.device == _CPU else 0


def _resources(
    server: ModelProfile, client: ModelProfile, conditions: Conditions
) -> tuple[Resource, ...]:
    share = conditions.server_capacity
    capacities = {
        LINK: conditions.link_bytes_per_second,
        SERVER_CPU: server.cores * share,
        SERVER_DEVICE: server.num_devices * share,
        CLIENT_CPU: client.cores,
        CLIENT_DEVICE: float(client.num_devices),
    }
    return tuple(
        Resource(name, capacities[name], UNITS[name]) for name in RESOURCES
    )


def _check_profiles(
    cuts: Sequence[CutFacts], server: ModelProfile, client: ModelProfile
) -> None:
    for tier, profile in (("server", server), ("client", client)):
        if profile.num_cuts != len(cuts):
            raise ValueError(
                f"the {tier}'s profile has {profile.num_cuts} cuts, the "
                f"region {len(cuts)}: take the profile of this package"
            )
        if not profile.reference_seconds > 0:
            raise ValueError(
                f"the {tier}'s profile has reference_seconds "
                f"{profile.reference_seconds}; it must be above 0"
            )


def _measured(
    seconds: Mapping[Route, float],
    route: Route,
    what: str,
) -> float:
    if route not in seconds:
        raise ValueError(
            f"{what} {route.label} was not measured, its bytes were"
        )
    return seconds[route]


def _lower_hull(
    points: Iterable[tuple[float, float]],
) -> list[tuple[float, float]]:
    """Returns corners from left to right (Andrew's monotone chain)."""
    hull: list[tuple[float, float]] = []
    for point in sorted(points):
        if hull and hull[-1][0] == point[0]:
            continue
        while len(hull) > 1 and not _turns_left(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _turns_left(
    a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]
) -> bool:
    return (b[0] - a[0]) * (c[1] - a[1]) > (b[1] - a[1]) * (c[0] - a[0])
