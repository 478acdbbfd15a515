"""What the planner is asked, and what it answers: plain numbers.

A *cut* is a position in the frozen region; what lies before it runs next to
the data, what lies after it in the client. Cut 0 is streaming: the client
gets the images. An *option* is a cut and the encoding in which its features
travel. Every option takes so much of each *resource* for one sample.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from hapi_protocol.encodings import COMPRESSIONS, DTYPES, Encoding
from hapi_splitter.units import number_text, percent_text

RAW = "raw"
"""Encoding of cut 0: the image as it is stored."""

Route: TypeAlias = tuple[int, str]
"""That samples go: cut and encoding."""

RAW_ROUTE: Route = (0, RAW)

LINK = "link"
SERVER_CPU = "server cpu"
SERVER_DEVICE = "server device"
CLIENT_CPU = "client cpu"
CLIENT_DEVICE = "client device"
RESOURCES = (LINK, SERVER_CPU, SERVER_DEVICE, CLIENT_CPU, CLIENT_DEVICE)

UNSEEN_LINK = 1e12
"""Bytes per second of a link that has not been a limit yet."""

UNITS = {
    LINK: "bytes/s",
    SERVER_CPU: "cores",
    SERVER_DEVICE: "devices",
    CLIENT_CPU: "cores",
    CLIENT_DEVICE: "devices",
}


@dataclass(frozen=True)
class Resource:
    """Something that all samples share.

    Attributes:
        name: one of :data:`RESOURCES`.
        capacity: per second: bytes of the link, core-seconds (that is
            cores), device-seconds (devices). 0 if there is none of it.
        unit: of the capacity: ``bytes/s``, ``cores`` or ``devices``.
    """

    name: str
    capacity: float
    unit: str

    def __post_init__(self) -> None:
        _check_amount(self.capacity, f"the capacity of {self.name!r}")


@dataclass(frozen=True)
class Option:
    """One cut with one encoding.

    Attributes:
        cut: 0 for streaming.
        encoding: canonical text; :data:`RAW` for cut 0.
        use: of each resource per sample, in bytes, core-seconds or
            device-seconds; a resource that is not named is not used.
        server_bytes: memory for one sample on the server's device.
        client_bytes: memory for one sample on the client's device.
        work: seconds by kind (:mod:`hapi_splitter.planner.resource_use`), of
            which ``use`` was made; nothing where only that is known.
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
                f"cut {self.cut} has encoding {self.encoding!r}: cut 0 has "
                f"{RAW!r} and no other cut has it"
            )
        if self.cut:
            Encoding.parse(self.encoding)
        for name, amount in self.use.items():
            _check_amount(amount, f"what {self.label} takes of {name!r}")
        if not any(self.use.values()):
            raise ValueError(f"{self.label} takes nothing of any resource")

    @property
    def route(self) -> Route:
        """Cut and encoding, which no other option of a problem has."""
        return self.cut, self.encoding

    @property
    def label(self) -> str:
        """For people."""
        if self.cut == 0:
            return "stream"
        return f"cut {self.cut} · {self.encoding}"

    @property
    def rounding(self) -> int:
        """How little of the features is left; 0 for images, then 1 to 12.

        Counts first the number format, then, as it costs time, compression.
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
        """Puts options in order, by cut, then the most exact first."""
        return self.cut, self.rounding


@dataclass(frozen=True)
class Problem:
    """Which mix of options gets through the samples soonest?

    Attributes:
        resources: each name once.
        options: all that min_precision allows, streaming among them.
        num_samples: of the data set.
        epochs: still to come, may be a fraction.
        push_one_off_seconds: before the first features come: upload of the
            package, its loading, the profile; 0 once that is done.
        upload_bytes: of the package, whose upload takes a part of them that
            depends on the link.
        upload_bytes_per_second: at most, whatever the link has.
        server_limit_bytes: options that need more memory are left out.
        client_limit_bytes: the same for the client's device.
        last_cut: the cut behind the whole frozen region.
        server_threads: cores that layers take there, 0 on an accelerator.
        client_threads: likewise in the client.
    """

    resources: tuple[Resource, ...]
    options: tuple[Option, ...]
    num_samples: int
    epochs: float
    push_one_off_seconds: float
    server_limit_bytes: int
    client_limit_bytes: int
    last_cut: int
    server_threads: int = 0
    client_threads: int = 0
    upload_bytes: float = 0.0
    upload_bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        _check_unique("resource", (each.name for each in self.resources))
        _check_unique("option", (each.label for each in self.options))
        _check_amount(self.num_samples, "the number of samples")
        _check_amount(self.epochs, "the number of epochs")
        _check_amount(self.push_one_off_seconds, "the one-off cost")
        _check_amount(self.upload_bytes, "the size of the package")
        if not any(each.cut == 0 for each in self.options):
            raise ValueError("streaming (cut 0) is not among the options")
        known = {each.name for each in self.resources}
        for option in self.options:
            if option.cut > self.last_cut:
                raise ValueError(
                    f"{option.label} lies behind the last cut, {self.last_cut}"
                )
            if unknown := sorted(set(option.use) - known):
                raise ValueError(
                    f"{option.label} takes of {unknown[0]!r}, which is not "
                    f"among the resources"
                )

    @property
    def remaining_samples(self) -> float:
        """Samples times epochs."""
        return self.num_samples * self.epochs

    def capacity(self, resource: str) -> float:
        """Per second; infinite where the problem has no such resource."""
        for each in self.resources:
            if each.name == resource:
                return each.capacity
        return math.inf

    def with_bandwidth(self, bytes_per_second: float) -> Problem:
        """The same over another link, the package's upload included.

        Args:
            bytes_per_second: of the link, above 0.
        """
        resources = tuple(
            replace(each, capacity=bytes_per_second)
            if each.name == LINK
            else each
            for each in self.resources
        )
        upload = self._upload_seconds(bytes_per_second)
        if upload:
            upload -= self._upload_seconds(self.capacity(LINK))
        return replace(
            self,
            resources=resources,
            # Rounding must not make nothing less than nothing.
            push_one_off_seconds=max(0.0, self.push_one_off_seconds + upload),
        )

    def _upload_seconds(self, link: float) -> float:
        if not self.upload_bytes:
            return 0.0
        return self.upload_bytes / min(link, self.upload_bytes_per_second)

    def seconds(self, option: Option, resource: str) -> float:
        """Of a resource with all its capacity, for one sample."""
        return self.seconds_for(option.use.get(resource, 0.0), resource)

    def seconds_for(self, amount: float, resource: str) -> float:
        """Of a resource with all its capacity, for so much of it.

        Infinite for something of a resource that is not there.
        """
        if amount == 0:
            return 0.0
        capacity = self.capacity(resource)
        return amount / capacity if capacity else math.inf

    def samples_per_second(self, option: Option) -> float:
        """Of this option alone, when all its stages overlap."""
        return 1 / max(
            self.seconds(option, each.name) for each in self.resources
        )

    def fits(self, option: Option) -> bool:
        """Whether both tiers have the memory for one sample."""
        return (
            option.server_bytes <= self.server_limit_bytes
            and option.client_bytes <= self.client_limit_bytes
        )


@dataclass(frozen=True)
class Plan:
    """A mix of options, what it will do, and why it was chosen.

    Attributes:
        rule: ``auto``, ``stream``, ``freeze``, ``static``, ``hapi-2022`` or
            ``hapi-sc24``.
        mix: options with the shares of the samples they get, in the order
            of the cuts; the shares are positive and sum to 1.
        samples_per_second: once everything runs.
        one_off_seconds: before push-down can start; 0 for streaming.
        total_seconds: one-off costs and all samples to come.
        binding: resources that are in use all the time (99.9 %).
        utilisation: 0 to 1 by resource.
        pays_from_samples: number of samples to come from which push-down
            is faster than streaming, one-off costs counted; None if it never
            is, 0 if it is at once.
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
        """``60 % cut 9 · uint8 + 40 % stream: 163 samples/s, limited …``."""
        rate = number_text(self.samples_per_second)
        limits = " and ".join(self.binding)
        return f"{self.label}: {rate} samples/s, limited by {limits}"

    @property
    def pushes(self) -> bool:
        """Whether any sample is pushed."""
        return any(option.cut for option, _ in self.mix)

    @property
    def label(self) -> str:
        """The mix for people, as ``60 % cut 9 · uint8 + 40 % stream``."""
        if len(self.mix) == 1:
            return self.mix[0][0].label
        largest_first = sorted(self.mix, key=lambda part: -part[1])
        return " + ".join(
            f"{percent_text(weight)} {option.label}"
            for option, weight in largest_first
        )


def _check_amount(amount: float, what: str) -> None:
    if not (amount >= 0 and math.isfinite(amount)):
        raise ValueError(f"{what} is {amount}: not a number from 0 up")


def _check_unique(kind: str, names: Iterable[str]) -> None:
    counts = Counter(names)
    if not counts:
        raise ValueError(f"there is no {kind}")
    name, count = counts.most_common(1)[0]
    if count > 1:
        raise ValueError(f"{kind} {name!r} is there {count} times")
