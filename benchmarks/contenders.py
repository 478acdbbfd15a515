"""Which static cuts are worth a measurement, and what the planner expects."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hapi_client.plan_report.plan_tables import Report
from hapi_protocol.encodings import PRECISIONS
from hapi_protocol.profiles import ModelProfile
from hapi_splitter.planner.costs import (
    Conditions,
    CutFacts,
    SampleCosts,
    StartupCost,
    build_problem,
)
from hapi_splitter.planner.plan import (
    LINK,
    RAW,
    Option,
    Problem,
    static,
    static_at,
)

TOLERANCE = 0.05
"""Cuts this close in every resource count as one; see :func:`distinct`."""

MAX_MORE_CUTS = 2
NEARLY = 0.9
"""Beside the fastest measured cut; see :func:`more_cuts`."""
PLAIN = "float32"
PUBLISHED_RULES = ("hapi-2022", "hapi-sc24")

Uses = Mapping[str, float]


@dataclass(frozen=True)
class Static:
    """A fixed cut, with its best encoding under the floor.

    Attributes:
        cut: 0 for streaming.
        encoding: on the wire.
        link_bytes: on the wire, per sample.
    """

    cut: int
    encoding: str
    link_bytes: float

    @property
    def name(self) -> str:
        return f"cut-{self.cut}" if self.cut else "stream"

    @property
    def route(self) -> tuple[int, str]:
        return self.cut, self.encoding


@dataclass(frozen=True)
class Outlook:
    """What is worth a measurement.

    Attributes:
        statics: cuts that no other one dominates.
        rules: published rule to the (cut, encoding) it chooses.
        predicted: samples per second by contender, from the profiles.
    """

    statics: Sequence[Static]
    rules: Mapping[str, Static]
    predicted: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Outlook:
        return cls(
            statics=[Static(**each) for each in body["statics"]],
            rules={k: Static(**each) for k, each in body["rules"].items()},
            predicted=body["predicted"],
        )


def distinct(
    uses: Mapping[int, Uses], scales: Uses, tolerance: float = TOLERANCE
) -> list[int]:
    """Cuts that represent all non-dominated ones.

    A cut is left out when one that is kept needs, of every resource, at
    most as much plus ``tolerance`` of that resource's scale (additive
    epsilon-dominance: Laumanns et al., Evolutionary Computation 10(3), 2002).

    Args:
        uses: per cut and resource.
        scales: per resource, what counts as much.
        tolerance: 0 leaves out only what is dominated outright.

    Returns:
        In ascending order.
    """

    def total(cut: int) -> float:
        return sum(uses[cut][name] / scales[name] for name in scales)

    kept: list[int] = []
    for cut in sorted(uses, key=lambda cut: (total(cut), cut)):
        if not any(
            all(
                uses[other][name] <= uses[cut][name] + tolerance * scale
                for name, scale in scales.items()
            )
            for other in kept
        ):
            kept.append(cut)
    return sorted(kept)


def outlook(report: Report) -> Outlook:
    """What to measure beside streaming and the job's own plan.

    Args:
        report: of :func:`hapi_client.plan_report.plan_study.advise`, for the
            cell's link.
    """
    problem = report.problem
    statics = _statics(problem)
    rules = {
        name: _fixed(report.plans[name].mix[0][0])
        for name in PUBLISHED_RULES
        if name in report.plans
    }
    rates = {
        option.route: problem.samples_per_second(option)
        for option in problem.options
    }
    chosen = [*statics, *rules.values()]
    named = {**{each.name: each for each in chosen}, **rules}
    predicted = {name: rates[each.route] for name, each in named.items()}
    predicted["stream"] = rates[0, RAW]
    predicted["auto"] = report.plans["auto"].samples_per_second
    return Outlook(statics, rules, predicted)


def problem_json(problem: Problem, train_seconds: float) -> dict[str, Any]:
    """What the profiles say, for :mod:`benchmarks.replay`.

    Args:
        problem: of the planner.
        train_seconds: of the training loop, per sample; it is in the
            problem's options.
    """
    return {
        "capacities": {r.name: r.capacity for r in problem.resources},
        "options": [
            {
                "cut": o.cut,
                "encoding": o.encoding,
                "link_bytes": o.use[LINK],
                "work": dict(o.work),
            }
            for o in problem.options
            if problem.fits(o)
        ],
        "train_seconds": train_seconds,
    }


def _fixed(option: Option) -> Static:
    return Static(option.cut, option.encoding, option.use.get(LINK, 0.0))


def _statics(problem: Problem) -> list[Static]:
    """Each cut in its fastest encoding, near ones left out."""
    options = {
        cut: static_at(problem, cut).mix[0][0]
        for cut in sorted(
            {o.cut for o in problem.options if o.cut and problem.fits(o)}
        )
    }
    names = [each.name for each in problem.resources if each.capacity]
    uses = {
        cut: {name: problem.seconds(option, name) for name in names}
        for cut, option in options.items()
    }
    # Near is what differs little beside the time that the best one takes.
    best = static(problem)
    scales = dict.fromkeys(names, 1 / best.samples_per_second)
    kept = {*distinct(uses, scales), best.mix[0][0].cut} - {0}
    return [_fixed(options[cut]) for cut in sorted(kept)]


def more_cuts(
    cuts: Sequence[CutFacts],
    server: ModelProfile,
    client: ModelProfile,
    samples: SampleCosts,
    conditions: Conditions,
) -> list[int]:
    """Cuts that were not measured and may be good ones by themselves.

    A plan mixes, and for a mix the cuts near the hull of bytes over work do;
    a single cut may do best elsewhere, where both tiers take as long. All
    cuts are compared by the profiles, uncompressed, and with the seconds a
    byte that encoding takes at a measured cut.

    Args:
        cuts, server, client, samples, conditions: as for
            :func:`hapi_splitter.planner.costs.build_problem`.

    Returns:
        Those at least nearly as fast as the best measured one, at most
        :data:`MAX_MORE_CUTS`, in ascending order.
    """
    # The largest: of a small one the time is all overhead.
    known = max(
        (cut for cut, encoding in samples.wire_bytes),
        key=lambda cut: samples.wire_bytes[cut, PLAIN],
    )
    per_byte = [
        seconds[known, PLAIN] / samples.wire_bytes[known, PLAIN]
        for seconds in (samples.encode_seconds, samples.unpack_seconds)
    ]
    plain = {(cut.index, PLAIN): cut.float32_bytes for cut in cuts}
    problem = build_problem(
        cuts,
        server,
        client,
        SampleCosts(
            raw_bytes=samples.raw_bytes,
            decode_seconds=samples.decode_seconds,
            wire_bytes=plain,
            encode_seconds={w: n * per_byte[0] for w, n in plain.items()},
            unpack_seconds={w: n * per_byte[1] for w, n in plain.items()},
            span_samples=samples.span_samples,
        ),
        conditions,
        floor=PRECISIONS[0],
        num_samples=1,
        epochs=1.0,
        one_off=StartupCost(),
    )
    rates = {
        option.cut: problem.samples_per_second(option)
        for option in problem.options
        if option.cut and problem.fits(option)
    }
    measured = {cut for cut, _ in samples.wire_bytes}
    least = NEARLY * max(rates[cut] for cut in measured if cut in rates)
    others = [
        cut for cut in rates if cut not in measured and rates[cut] >= least
    ]
    best = sorted(others, key=lambda cut: (-rates[cut], cut))
    return sorted(best[:MAX_MORE_CUTS])


def who_measures(found: Outlook) -> tuple[list[Static], dict[str, str]]:
    """Jobs to run, each (cut, encoding) once, and who shares whose.

    Returns:
        The jobs beside ``stream`` and ``auto``, and by name of a
        contender that of the job whose measurements it shares.
    """
    jobs = {each.route: each for each in found.statics}
    shared = {}
    for name, each in found.rules.items():
        # A cut may be left out as near to another one, and still be chosen.
        if each.cut:
            jobs.setdefault(each.route, each)
        shared[name] = each.name
    return sorted(jobs.values(), key=lambda job: job.cut), shared
