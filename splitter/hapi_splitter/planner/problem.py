"""Input and output of the planner, as plain numbers.

A *cut* is a position in the frozen region: layers before it run next to the
data, layers after it on the client. Cut 0 is streaming: the client reads the
stored images. An *option* is a cut and the encoding of its features, with its
use of each *resource* per sample.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hapi_protocol.encodings import COMPRESSIONS, DTYPES, Encoding
from hapi_splitter.described import Described
from hapi_splitter.units import number_text, percent_text, seconds_text

RAW = "raw"
"""Encoding of cut 0, the stored image."""


class Route(NamedTuple):
    """The way of a sample: its cut, and the encoding of its features there."""

    cut: int
    encoding: str

    @property
    def label(self) -> str:
        """Text for people: ``stream``, or such as ``cut 9 · uint8``."""
        return f"cut {self.cut} · {self.encoding}" if self.cut else "stream"


RAW_ROUTE = Route(0, RAW)


def mix_label(weights: Mapping[Route, float]) -> str:
    """Returns weights as text: ``60 % cut 9 · uint8 + 40 % stream``."""
    if len(weights) == 1:
        return next(iter(weights)).label
    return " + ".join(
        f"{percent_text(weight)} {route.label}"
        for route, weight in sorted(weights.items(), key=lambda p: -p[1])
    )


LINK = "link"
SERVER_CPU = "server cpu"
SERVER_DEVICE = "server device"
CLIENT_CPU = "client cpu"
CLIENT_DEVICE = "client device"
RESOURCES = (LINK, SERVER_CPU, SERVER_DEVICE, CLIENT_CPU, CLIENT_DEVICE)

UNSEEN_LINK = 1e12
"""Assumed bytes per second of a link that has not been a limit yet: ten times
the fastest Ethernet (800 Gbit/s, IEEE 802.3df), so that it is none."""

UNITS = {
    LINK: "bytes/s",
    SERVER_CPU: "cores",
    SERVER_DEVICE: "devices",
    CLIENT_CPU: "cores",
    CLIENT_DEVICE: "devices",
}


@dataclass(frozen=True)
class Resource:
    """A resource that all samples share.

    Attributes:
        name: one of :data:`RESOURCES`.
        capacity: bytes per second of the link, number of cores or devices; 0
            if the resource does not exist.
        unit: unit of the capacity: ``bytes/s``, ``cores`` or ``devices``.
    """

    name: str
    capacity: float
    unit: str

    def __post_init__(self) -> None:
        _check_amount(self.capacity, f"the capacity of {self.name!r}")


@dataclass(frozen=True)
class Option:
    """A route and its costs.

    Attributes:
        cut: 0 for streaming.
        encoding: canonical text; :data:`RAW` for cut 0.
        use: bytes, core-seconds or device-seconds per sample, by resource;
            others are not used.
        server_bytes: memory for one sample on the server's device.
        client_bytes: memory for one sample on the client's device.
        work: seconds by cost component
            (:mod:`hapi_splitter.planner.resource_use`), from which ``use`` was
            computed; empty if unknown.
    """

    cut: int
    encoding: str
    use: Mapping[str, float]
    server_bytes: int
    client_bytes: int
    work: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.cut < 0:
            raise ValueError(f"cut {self.cut} is negative")
        if (self.cut == 0) != (self.encoding == RAW):
            raise ValueError(
                f"cut {self.cut} has encoding {self.encoding!r}; cut 0 and "
                f"only cut 0 must have {RAW!r}"
            )
        if self.cut:
            Encoding.parse(self.encoding)
        for name, amount in self.use.items():
            _check_amount(amount, f"the use of {name!r} by {self.label}")
        if not any(self.use.values()):
            raise ValueError(f"{self.label} uses no resource")

    @property
    def route(self) -> Route:
        """Cut and encoding, unique among the options of a problem."""
        return Route(self.cut, self.encoding)

    @property
    def label(self) -> str:
        """Text for people; see :attr:`Route.label`."""
        return self.route.label

    @property
    def rounding(self) -> int:
        """Rank of the encoding's rounding, 0 for images, then 1 to 12.

        Ordered by number format, then by compression, which costs time.
        """
        if self.cut == 0:
            return 0
        encoding = Encoding.parse(self.encoding)
        return (
            1
            + len(COMPRESSIONS) * DTYPES.index(encoding.dtype)
            + COMPRESSIONS.index(encoding.compression)
        )

    @property
    def key(self) -> tuple[int, int]:
        """Sort key, by cut, then the most exact encoding first."""
        return self.cut, self.rounding


@dataclass(frozen=True)
class StartupCost:
    """Startup costs of push-down.

    Attributes:
        package_bytes: bytes to upload; 0 if the package is in the store.
        load_seconds: until the worker has checked and loaded it.
        profile_seconds: until the worker has profiled it.
        upload_bytes_per_second: limit of the upload; None for the link's.
    """

    package_bytes: float = 0.0
    load_seconds: float = 0.0
    profile_seconds: float = 0.0
    upload_bytes_per_second: float | None = None

    def seconds(self, link_bytes_per_second: float) -> float:
        """Returns the total, with an upload over a link."""
        upload = 0.0
        if self.package_bytes:
            rate = self.upload_bytes_per_second or link_bytes_per_second
            upload = self.package_bytes / min(rate, link_bytes_per_second)
        return upload + self.load_seconds + self.profile_seconds


@dataclass(frozen=True)
class Problem:
    """The planner's input: find the mix of options with the shortest time.

    Attributes:
        resources: with unique names.
        options: all that ``min_precision`` allows, including streaming.
        num_samples: size of the data set.
        epochs: remaining epochs of samples that are computed, may be a
            fraction.
        server_limit_bytes: memory of the server's device; options that need
            more are excluded.
        client_limit_bytes: memory of the client's device; options that need
            more are excluded.
        last_cut: the cut after the whole frozen region.
        server_threads: cores that layers use on the server; 0 on an
            accelerator.
        client_threads: cores that layers use on the client; 0 on an
            accelerator.
        startup: startup cost of push-down; none once that is done.
        cached_samples: further samples, whose features the client has cached.
        cached_sample_seconds: time of one of these, in the training loop.
    """

    resources: tuple[Resource, ...]
    options: tuple[Option, ...]
    num_samples: int
    epochs: float
    server_limit_bytes: int
    client_limit_bytes: int
    last_cut: int
    server_threads: int = 0
    client_threads: int = 0
    startup: StartupCost = StartupCost()
    cached_samples: float = 0.0
    cached_sample_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check_unique("resource", (r.name for r in self.resources))
        _check_unique("option", (option.label for option in self.options))
        _check_amount(self.num_samples, "the number of samples")
        _check_amount(self.epochs, "the number of epochs")
        startup = self.startup
        _check_amount(startup.package_bytes, "the size of the package")
        _check_amount(
            startup.load_seconds + startup.profile_seconds, "the startup cost"
        )
        if not any(option.cut == 0 for option in self.options):
            raise ValueError("streaming (cut 0) is not among the options")
        known = {resource.name for resource in self.resources}
        for option in self.options:
            if option.cut > self.last_cut:
                raise ValueError(
                    f"{option.label} is after the last cut, {self.last_cut}"
                )
            if unknown := sorted(set(option.use) - known):
                raise ValueError(
                    f"{option.label} uses {unknown[0]!r}, which is not among "
                    f"the resources"
                )

    @property
    def remaining_samples(self) -> float:
        """Number of samples times remaining epochs."""
        return self.num_samples * self.epochs

    @property
    def push_one_off_seconds(self) -> float:
        """Startup cost of push-down: upload, loading and profiling."""
        return self.startup.seconds(self.capacity(LINK))

    def capacity(self, resource: str) -> float:
        """Returns a resource's capacity; infinite if it is not listed."""
        capacities = (r.capacity for r in self.resources if r.name == resource)
        return next(capacities, math.inf)

    def with_bandwidth(self, bytes_per_second: float) -> Problem:
        """Returns the problem with another link, also for the upload.

        Args:
            bytes_per_second: bandwidth of the link, above 0.
        """
        resources = tuple(
            replace(resource, capacity=bytes_per_second)
            if resource.name == LINK
            else resource
            for resource in self.resources
        )
        return replace(self, resources=resources)

    def seconds(self, option: Option, resource: str) -> float:
        """Returns seconds of a whole resource for one sample."""
        return self.seconds_for(option.use.get(resource, 0.0), resource)

    def seconds_for(self, amount: float, resource: str) -> float:
        """Returns seconds of a whole resource for an amount of it.

        Infinite if the resource does not exist.
        """
        if amount == 0:
            return 0.0
        capacity = self.capacity(resource)
        return amount / capacity if capacity else math.inf

    def samples_per_second(self, option: Option) -> float:
        """Returns the rate of an option alone, with overlapping stages."""
        return 1 / max(
            self.seconds(option, resource.name) for resource in self.resources
        )

    def fits(self, option: Option) -> bool:
        """Returns True if both tiers have the memory for one sample."""
        return (
            option.server_bytes <= self.server_limit_bytes
            and option.client_bytes <= self.client_limit_bytes
        )


@dataclass(frozen=True, repr=False)
class Plan(Described):
    """A mix of options with its prediction and explanation.

    Attributes:
        rule: the policy that chose it: ``auto``, ``stream``, ``freeze``,
            ``static``, or a name of a comparison.
        mix: options and their weights, ordered by cut; weights are positive
            fractions of the samples and sum to 1.
        samples_per_second: throughput after startup.
        one_off_seconds: startup cost; 0 for streaming.
        total_seconds: startup cost and time of all remaining samples.
        binding: resources that are fully used (99.9 %).
        utilisation: 0 to 1, by resource.
        pays_from_samples: break-even samples: number of remaining samples
            from which push-down is faster than streaming, including startup
            costs; None if it never is.
        reasons: sentences for people.
    """

    rule: str
    mix: tuple[tuple[Option, float], ...]
    samples_per_second: float
    one_off_seconds: float
    total_seconds: float
    binding: tuple[str, ...]
    utilisation: Mapping[str, float]
    pays_from_samples: float | None
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """Returns ``60 % cut 9 · uint8 + 40 % stream: 163 samples/s, …``."""
        rate = number_text(self.samples_per_second)
        limits = " and ".join(self.binding)
        return f"{self.label}: {rate} samples/s, limited by {limits}"

    def describe(self) -> Mapping[str, str]:
        """Returns mix, prediction and reasons, by name."""
        facts = {
            "plan": self.label,
            "predicted": f"{number_text(self.samples_per_second)} samples/s",
            "limited by": " and ".join(self.binding),
        }
        if self.one_off_seconds:
            facts["startup"] = seconds_text(self.one_off_seconds)
        if self.pays_from_samples:
            count = number_text(self.pays_from_samples)
            facts["pays from"] = f"{count} samples"
        return facts | {"why": "; ".join(self.reasons)}

    @property
    def pushes(self) -> bool:
        """True if any sample is pushed down."""
        return any(option.cut for option, _ in self.mix)

    @property
    def label(self) -> str:
        """Text for people, such as ``60 % cut 9 · uint8 + 40 % stream``."""
        return mix_label({option.route: w for option, w in self.mix})


def _check_amount(amount: float, name: str) -> None:
    if not (amount >= 0 and math.isfinite(amount)):
        raise ValueError(f"{name} must be finite and at least 0, not {amount}")


def _check_unique(kind: str, names: Iterable[str]) -> None:
    counts = Counter(names)
    if not counts:
        raise ValueError(f"there is no {kind}")
    name, count = counts.most_common(1)[0]
    if count > 1:
        raise ValueError(f"{kind} {name!r} occurs {count} times")
