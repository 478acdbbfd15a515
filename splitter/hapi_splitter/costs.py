"""What every option takes of every resource, from what was measured.

Costs are per sample: bytes on the link, core-seconds, device-seconds. The
server's share of cores that go into Swift itself is in ``server cpu``, for
Swift's processes run on the same hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hapi_protocol.encodings import allowed_encodings
from hapi_protocol.profiles import ModelProfile
from hapi_splitter.problem import (
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

DEFAULT_SERVE_SECONDS_PER_BYTE = 1 / 350e6
"""Core-seconds that Swift takes to serve one byte of a large object.

Swift 2.38 (proxy and object server together) reads 340 to 360 MB/s on one
core: GETs of 50 and 100 MB from a replicated policy on a memory file system,
without TLS and encryption. Erasure coding, TLS and encryption cost more."""

_CPU = "cpu"
_MOST_SHRINKING = 8
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
    """

    raw_bytes: float
    decode_seconds: float
    wire_bytes: Mapping[tuple[int, str], float]
    encode_seconds: Mapping[tuple[int, str], float]
    unpack_seconds: Mapping[tuple[int, str], float]


@dataclass(frozen=True)
class Conditions:
    """What changes while training.

    Attributes:
        link_bytes_per_second: of all the job's connections together.
        server_share: part of the worker's capacity that is ours, 0 to 1.
        train_seconds: per sample, of the training loop itself. It runs
            between the client's own forwards, one after the other.
        serve_seconds_per_byte: Swift's core-seconds for a byte that it
            reads or sends.
        scale: observed over profiled cost, by resource; 1 if not named.
    """

    link_bytes_per_second: float
    server_share: float = 1.0
    train_seconds: float = 0.0
    serve_seconds_per_byte: float = DEFAULT_SERVE_SECONDS_PER_BYTE
    scale: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.server_share <= 1:
            raise ValueError(
                f"the share of the server is {self.server_share}: not from "
                f"0 to 1"
            )
        for name in self.scale:
            if name not in RESOURCES:
                raise ValueError(
                    f"{name!r} is no resource; there are "
                    f"{', '.join(RESOURCES)}"
                )


@dataclass(frozen=True)
class OneOff:
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
        (cut.flops, cut.float32_bytes / _MOST_SHRINKING) for cut in distinct
    )
    chosen = {smallest.index, last.index}
    below = raw_bytes
    for cut in distinct:
        size = cut.float32_bytes / _MOST_SHRINKING
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
    floor: str,
    num_samples: int,
    epochs: float,
    one_off: OneOff,
) -> Problem:
    """The planner's problem.

    Args:
        cuts: all cuts, first to last.
        server: profile of the worker's tier.
        client: profile of the client's tier, of the same package.
        samples: its keys of ``wire_bytes`` become options, as far as the
            floor allows their encodings.
        conditions: of now.
        floor: one of :data:`hapi_protocol.encodings.FLOORS`.
        num_samples: of the data set.
        epochs: still to come.
        one_off: what push-down costs once.

    Raises:
        ValueError: profiles of other cuts, a measurement that is missing,
            an unknown floor.
    """
    _check_profiles(cuts, server, client)
    costs = _Costs(server, client, samples, conditions)
    allowed = set(allowed_encodings(floor))
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
        server_limit_bytes=server.memory_limit_bytes,
        client_limit_bytes=client.memory_limit_bytes,
        last_cut=len(cuts),
    )


@dataclass(frozen=True)
class _Costs:
    """Makes the options."""

    server: ModelProfile
    client: ModelProfile
    samples: SampleCosts
    conditions: Conditions

    def streaming(self) -> Option:
        client = self.client
        use = {
            LINK: self.samples.raw_bytes,
            SERVER_CPU: self._serving(self.samples.raw_bytes),
            CLIENT_CPU: self.samples.decode_seconds,
            CLIENT_DEVICE: 0.0,
        }
        self._compute_in_client(use, 0)
        return Option(0, RAW, self._scaled(use), 0, client.peak_bytes[-1])

    def pushed(self, cut: int, encoding: str) -> Option:
        samples, server = self.samples, self.server
        wire_bytes = samples.wire_bytes[cut, encoding]
        forward = server.seconds_per_sample(cut)
        server_cpu = self._on_server(
            samples.decode_seconds
            + _measured(samples.encode_seconds, cut, encoding, "encoding")
        ) + self._serving(samples.raw_bytes + wire_bytes)
        if server.device == _CPU:
            server_cpu += forward * server.forward_threads
        use = {
            LINK: wire_bytes,
            SERVER_CPU: server_cpu,
            SERVER_DEVICE: forward,
            CLIENT_CPU: _measured(
                samples.unpack_seconds, cut, encoding, "unpacking"
            ),
            CLIENT_DEVICE: 0.0,
        }
        self._compute_in_client(use, cut)
        # A forward in the client from an inner cut needs at most what the
        # whole region needs; behind the last cut none of it runs there.
        inner = cut < server.num_cuts
        return Option(
            cut,
            encoding,
            self._scaled(use),
            server.peak_bytes[cut],
            self.client.peak_bytes[-1] if inner else 0,
        )

    def _compute_in_client(self, use: dict[str, float], cut: int) -> None:
        """Adds the layers after a cut and the training loop."""
        client = self.client
        rest = max(
            0.0,
            client.seconds_per_sample(client.num_cuts)
            - client.seconds_per_sample(cut),
        )
        rest += self.conditions.train_seconds
        use[CLIENT_DEVICE] += rest
        if client.device == _CPU:
            use[CLIENT_CPU] += rest * client.forward_threads

    def _serving(self, num_bytes: float) -> float:
        """Core-seconds of Swift, which serves whom it likes.

        The share rations the worker's work, not Swift's. Capacity is the
        share's, so Swift's seconds count for that much less.
        """
        conditions = self.conditions
        return (
            num_bytes
            * conditions.serve_seconds_per_byte
            * conditions.server_share
        )

    def _on_server(self, client_core_seconds: float) -> float:
        """The same work on the server's cores."""
        ratio = self.server.reference_seconds / self.client.reference_seconds
        return client_core_seconds * ratio

    def _scaled(self, use: Mapping[str, float]) -> dict[str, float]:
        scale = self.conditions.scale
        return {name: each * scale.get(name, 1) for name, each in use.items()}


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
