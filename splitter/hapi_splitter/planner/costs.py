"""What every option takes of every resource, from what was measured.

Costs are per sample: bytes on the link, core-seconds, device-seconds. The
server's share of cores that go into Swift itself is in ``server cpu``, for
Swift's processes run on the same hosts. Factors learned while training
correct each kind of work by itself
(:mod:`hapi_splitter.planner.resource_use`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

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
"""Core-seconds that Swift takes to serve one byte of a large object.

Swift 2.38 (proxy and object server together) reads 340 to 360 MB/s on one
core: GETs of 50 and 100 MB from a replicated policy on a memory file system,
without TLS and encryption. Erasure coding, TLS and encryption cost more."""
DEFAULT_SERVE_SECONDS_PER_REQUEST = 0.0057
"""Core-seconds that Swift takes for a plain GET, whatever its length.

As above: CPU seconds of proxy and object server for GETs of 4, 16 and 64
photographs of 108 kB, less those for their bytes."""
DEFAULT_PUSH_SECONDS_PER_REQUEST = 0.0124
"""Likewise for an annotated GET, with its checks of rights and the exchange
with the worker."""

_CPU = "cpu"
_MAX_SHRINKING = 8
"""float32 to uint8 is a quarter; compression of what ReLU leaves halves it
once more."""
_NEAR_HULL = 1.1
_SAME_WORK = 0.01


@dataclass(frozen=True)
class CutFacts:
    """One cut, as far as the planner needs it.

    Attributes:
        index: 1 for the first.
        name: where it is in the user's model, for people.
        op: operator that yields the tensor.
        shape: of one sample.
        float32_bytes: of one sample, unencoded.
        flops: per sample, from the input to here.
    """

    index: int
    name: str
    op: str
    shape: tuple[int, ...]
    float32_bytes: int
    flops: int


@dataclass(frozen=True)
class SampleCosts:
    """What the client measured on a few real samples, per sample.

    Attributes:
        raw_bytes: in its shard, headers of tar members included.
        decode_seconds: core-seconds on the client, decode and transform.
        wire_bytes: in the Arrow stream, by cut and encoding.
        encode_seconds: core-seconds on the *client's* CPU.
        unpack_seconds: core-seconds on the client from Arrow to float32.
        span_samples: that one request brings.
    """

    raw_bytes: float
    decode_seconds: float
    wire_bytes: Mapping[tuple[int, str], float]
    encode_seconds: Mapping[tuple[int, str], float]
    unpack_seconds: Mapping[tuple[int, str], float]
    span_samples: float = MAX_SPAN_SAMPLES


@dataclass(frozen=True)
class Conditions:
    """What changes while training.

    Attributes:
        link_bytes_per_second: of all the job's connections together.
        server_share: part of the worker's capacity that is ours, 0 to 1.
        train_seconds: per sample, of the training loop itself. It runs
            between the client's own forwards, one after the other.
        handling_seconds: per sample, of the client's cores: for what is
            neither decoding, nor layers, nor training.
        serve_seconds_per_byte: Swift's core-seconds for a byte that it
            reads or sends.
        serve_seconds_per_request: for a plain GET of any length.
        push_seconds_per_request: for an annotated one.
        scale: observed over profiled cost, by kind of work; 1 if not named.
    """

    link_bytes_per_second: float
    server_share: float = 1.0
    train_seconds: float = 0.0
    handling_seconds: float = 0.0
    serve_seconds_per_byte: float = DEFAULT_SERVE_SECONDS_PER_BYTE
    serve_seconds_per_request: float = DEFAULT_SERVE_SECONDS_PER_REQUEST
    push_seconds_per_request: float = DEFAULT_PUSH_SECONDS_PER_REQUEST
    scale: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.server_share <= 1:
            raise ValueError(
                f"the share of the server is {self.server_share}: not from "
                f"0 to 1"
            )
        for name in self.scale:
            if name not in KINDS:
                raise ValueError(
                    f"{name!r} is no kind of work; there are "
                    f"{', '.join(KINDS)}"
                )


@dataclass(frozen=True)
class StartupCost:
    """What push-down costs once.

    Attributes:
        package_bytes: to upload, 0 if the package is there.
        upload_bytes_per_second: at most, whatever the link has; None for
            the link's.
        load_seconds: until the worker has checked and loaded it.
        profile_seconds: until the worker has profiled it.
    """

    package_bytes: float = 0.0
    load_seconds: float = 0.0
    profile_seconds: float = 0.0
    upload_bytes_per_second: float | None = None

    def seconds(self, link_bytes_per_second: float) -> float:
        """All of it, the upload over the link of the job."""
        upload = 0.0
        if self.package_bytes:
            rate = self.upload_bytes_per_second or link_bytes_per_second
            upload = self.package_bytes / min(rate, link_bytes_per_second)
        return upload + self.load_seconds + self.profile_seconds


def candidate_cuts(
    cuts: Sequence[CutFacts], raw_bytes: float
) -> tuple[int, ...]:
    """Cuts that are worth measuring, ascending.

    Those near the lower convex hull of bytes over floating point
    operations, for a mix of two cuts on the hull does as well as one above
    it, and smaller than all before them. Of cuts with the same bytes and
    nearly the same work the last counts, as ReLU follows a convolution:
    zeros compress. A cut counts only if a good encoding could make it
    smaller than the image; the smallest and the last cut always do.

    Args:
        cuts: all cuts, first to last.
        raw_bytes: of the average image, cut 0.
    """
    if not cuts:
        return ()
    last = cuts[-1]
    distinct = [
        cut
        for cut, following in pairwise(cuts)
        if following.float32_bytes != cut.float32_bytes
        or following.flops - cut.flops > _SAME_WORK * last.flops
    ]
    distinct.append(last)
    smallest = min(distinct, key=lambda cut: cut.float32_bytes)
    hull = _lower_hull(
        (cut.flops, cut.float32_bytes / _MAX_SHRINKING) for cut in distinct
    )
    chosen = {smallest.index, last.index}
    below = raw_bytes
    for cut in distinct:
        size = cut.float32_bytes / _MAX_SHRINKING
        if size < below and size <= _NEAR_HULL * _height(hull, cut.flops):
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
    one_off: StartupCost,
) -> Problem:
    """The planner's problem.

    Args:
        cuts: all cuts, first to last.
        server: profile of the worker's tier.
        client: profile of the client's tier, of the same package.
        samples: its keys of ``wire_bytes`` become options, as far as the
            min_precision allows their encodings.
        conditions: of now.
        min_precision: one of :data:`hapi_protocol.encodings.PRECISIONS`.
        num_samples: of the data set.
        epochs: still to come.
        one_off: what push-down costs once.

    Raises:
        ValueError: profiles of other cuts, a measurement that is missing,
            an unknown precision.
    """
    _check_profiles(cuts, server, client)
    costs = _Costs(server, client, samples, conditions)
    allowed = set(allowed_encodings(min_precision))
    options = [costs.streaming()]
    for cut, encoding in sorted(samples.wire_bytes):
        if not 1 <= cut <= len(cuts):
            raise ValueError(
                f"cut {cut} was measured, the region has 1 to {len(cuts)}"
            )
        if encoding in allowed:
            options.append(costs.pushed(cut, encoding))
    return Problem(
        resources=_resources(server, client, conditions),
        options=tuple(options),
        num_samples=num_samples,
        epochs=epochs,
        push_one_off_seconds=one_off.seconds(conditions.link_bytes_per_second),
        upload_bytes=one_off.package_bytes,
        upload_bytes_per_second=one_off.upload_bytes_per_second or math.inf,
        server_limit_bytes=server.memory_limit_bytes,
        client_limit_bytes=client.memory_limit_bytes,
        last_cut=len(cuts),
        server_threads=layer_threads(server),
        client_threads=layer_threads(client),
    )


@dataclass(frozen=True)
class _Costs:
    """Makes the options."""

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
        wire_bytes = samples.wire_bytes[cut, encoding]
        work = {
            SERVING: self._serving(
                samples.raw_bytes + wire_bytes,
                self.conditions.push_seconds_per_request,
            ),
            SERVER_DECODING: self._on_server(
                samples.decode_seconds
                + _measured(samples.encode_seconds, cut, encoding, "encoding")
            ),
            SERVER_LAYERS: server.seconds_per_sample(cut),
            CLIENT_DECODING: _measured(
                samples.unpack_seconds, cut, encoding, "unpacking"
            ),
            **self._in_client(cut),
        }
        # A forward in the client from an inner cut needs at most what the
        # whole region needs; behind the last cut none of it runs there.
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
            server_share=self.conditions.server_share,
            server_threads=layer_threads(self.server),
            client_threads=layer_threads(self.client),
        )
        return Option(cut, encoding, use, server_bytes, client_bytes, work)

    def _in_client(self, cut: int) -> dict[str, float]:
        """The layers after a cut, the training loop, and all the rest."""
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
        """Core-seconds of Swift."""
        return (
            num_bytes * self.conditions.serve_seconds_per_byte
            + request_seconds / self.samples.span_samples
        )

    def _on_server(self, client_core_seconds: float) -> float:
        """The same work on the server's cores."""
        ratio = self.server.reference_seconds / self.client.reference_seconds
        return client_core_seconds * ratio


def layer_threads(profile: ModelProfile) -> int:
    """Cores that a forward of this profile takes, 0 on an accelerator."""
    return profile.forward_threads if profile.device == _CPU else 0


def _resources(
    server: ModelProfile, client: ModelProfile, conditions: Conditions
) -> tuple[Resource, ...]:
    share = conditions.server_share
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
                f"the {tier}'s profile says that the reference image takes "
                f"{profile.reference_seconds} s"
            )


def _measured(
    seconds: Mapping[tuple[int, str], float],
    cut: int,
    encoding: str,
    what: str,
) -> float:
    if (cut, encoding) not in seconds:
        raise ValueError(
            f"{what} cut {cut} as {encoding} was not measured, its bytes were"
        )
    return seconds[cut, encoding]


def _lower_hull(
    points: Iterable[tuple[float, float]],
) -> list[tuple[float, float]]:
    """Corners, from left to right (Andrew's monotone chain)."""
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


def _height(hull: Sequence[tuple[float, float]], x: float) -> float:
    """Of the hull at a place between its ends."""
    for (left, low), (right, high) in pairwise(hull):
        if left <= x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return hull[0][1]
