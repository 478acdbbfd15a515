"""Which cuts to push, and how much of the data through each.

The planner knows what every option takes of every resource and mixes them
so that the most samples per second come through (:mod:`.mixture`); then it
asks whether that is worth its one-off costs. Numbers in, numbers out: no
torch, no clock, no chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hapi_splitter.planner import explanation as reasons
from hapi_splitter.planner.linear_program import (
    TIE,
    Floats,
    best_mix,
    best_rate,
)
from hapi_splitter.planner.problem import (
    LINK,
    RAW,
    Option,
    Plan,
    Problem,
    Resource,
)

__all__ = [
    "LINK",
    "RAW",
    "Option",
    "Plan",
    "Problem",
    "Resource",
    "able_options",
    "compare_precisions",
    "crossover_bandwidth",
    "evaluate",
    "freeze",
    "seconds_matrix",
    "solve",
    "static",
    "static_at",
    "stream",
    "streaming_plan",
]

BINDING = 0.999
"""A resource in use for at least this part of the time is a limit."""
_STEP = math.sqrt(10.0)
_STEPS = 8
"""No link is tried that is faster or slower than ours by more than
``_STEP ** _STEPS``, ten thousand."""
_HALVINGS = 10
"""Bring a turning link to a thousandth."""


def solve(problem: Problem) -> Plan:
    """The fastest plan (rule ``auto``).

    Equally good mixes are decided for streaming, then for exact encodings
    and fewer options. Options that do not fit are left out; the reasons name
    them.

    Raises:
        ValueError: nothing fits, or nothing can run.
    """
    best = _steady(problem)
    streaming = streaming_plan(problem)
    chosen = best
    if (
        streaming is not None
        and best.pushes
        and not _pays(best.pays_from_samples, problem)
    ):
        chosen = replace(
            streaming, rule="auto", pays_from_samples=best.pays_from_samples
        )
    sentences = reasons.explain(
        problem,
        chosen,
        best,
        streaming,
        static(problem),
        crossover_bandwidth(problem, chosen),
    )
    return replace(chosen, reasons=sentences)


def evaluate(
    problem: Problem, mix: Iterable[tuple[Option, float]], rule: str
) -> Plan:
    """What a given mix does.

    Args:
        mix: options of the problem and their weights, which are scaled to
            the sum 1.
        rule: name for the plan.

    Raises:
        ValueError: no weight, a negative one, or an option that does not
            fit.
    """
    parts = _normalised(problem, mix)
    seconds = {
        each.name: sum(
            weight * problem.seconds(option, each.name)
            for option, weight in parts
        )
        for each in problem.resources
    }
    slowest = max(seconds.values())
    blocked = math.isinf(slowest)
    utilisation = {
        name: float(each == slowest) if blocked else each / slowest
        for name, each in seconds.items()
    }
    one_off = 0.0
    if any(option.cut for option, _ in parts):
        one_off = problem.push_one_off_seconds
    to_come = problem.remaining_samples
    plan = Plan(
        rule=rule,
        mix=parts,
        samples_per_second=0.0 if blocked else 1 / slowest,
        one_off_seconds=one_off,
        total_seconds=one_off + (to_come * slowest if to_come else 0.0),
        binding=tuple(n for n, part in utilisation.items() if part >= BINDING),
        utilisation=utilisation,
        pays_from_samples=_pays_from(problem, parts, slowest),
        reasons=(),
    )
    if blocked:
        return plan
    return replace(plan, reasons=reasons.describe(problem, plan))


def stream(problem: Problem) -> Plan:
    """The client gets the images and computes everything.

    Raises:
        ValueError: the client has not the memory for it.
    """
    return replace(static_at(problem, 0), rule="stream")


def freeze(problem: Problem) -> Plan:
    """The whole frozen region is pushed, in its best encoding.

    Raises:
        ValueError: it does not fit, or has no encoding.
    """
    return replace(static_at(problem, problem.last_cut), rule="freeze")


def static(problem: Problem) -> Plan:
    """The single option with the least time in total.

    Raises:
        ValueError: none fits.
    """
    return _least_time(problem, _fitting(problem), "static")


def static_at(problem: Problem, cut: int) -> Plan:
    """A cut in its fastest encoding, the most exact of those.

    Raises:
        ValueError: the cut is not among the options, or does not fit.
    """
    offered = [each for each in problem.options if each.cut == cut]
    if not offered:
        offers = ", ".join(map(str, sorted({o.cut for o in problem.options})))
        raise ValueError(
            f"cut {cut} is not among the options; there are cuts {offers}"
        )
    fitting = [each for each in offered if problem.fits(each)]
    if not fitting:
        raise ValueError(reasons.too_big(problem, offered))
    return _least_time(problem, fitting, "static")


def compare_precisions(
    chosen: Plan, problems_by_precision: Mapping[str, Problem]
) -> tuple[str, ...]:
    """What other floors would change, one sentence for each.

    Args:
        chosen: the plan under the floor that is in force.
        problems_by_precision: the same problem with what other floors allow.
    """
    return tuple(
        reasons.other_precision(min_precision, chosen, solve(problem))
        for min_precision, problem in problems_by_precision.items()
    )


def crossover_bandwidth(problem: Problem, chosen: Plan) -> float | None:
    """Bytes per second of a link at which the choice would turn.

    That is, between streaming and pushing anything. Looked for among faster
    links first for a plan that pushes, among slower ones first for
    streaming, the nearest ones before others: where a large package is to
    be sent, very slow links stream again. None if no link between a
    ten-thousandth and the ten-thousandfold of ours turns it.
    """
    now = problem.capacity(LINK)
    if not 0 < now < math.inf:
        return None
    factors = (_STEP, 1 / _STEP)
    for factor in factors if chosen.pushes else reversed(factors):
        same = now
        for _ in range(_STEPS):
            other = same * factor
            if _pushing_is_faster(problem, other) != chosen.pushes:
                return _turn_between(problem, chosen.pushes, same, other)
            same = other
    return None


def _turn_between(
    problem: Problem, pushes: bool, near: float, far: float
) -> float:
    same, other = math.log(near), math.log(far)
    for _ in range(_HALVINGS):
        middle = (same + other) / 2
        if _pushing_is_faster(problem, math.exp(middle)) == pushes:
            same = middle
        else:
            other = middle
    return math.exp((same + other) / 2)


def _steady(problem: Problem) -> Plan:
    """The mix with the highest rate, whatever it costs to begin."""
    options = able_options(problem)
    if not options:
        missing = [r.name for r in problem.resources if not r.capacity]
        raise ValueError(
            f"no option can run: there is no {' and no '.join(missing)}"
        )
    seconds = seconds_matrix(problem, options)
    weights = best_mix(seconds, np.array([_favour(o) for o in options]))
    return evaluate(
        problem,
        ((o, float(w)) for o, w in zip(options, weights, strict=True)),
        "auto",
    )


def _favour(option: Option) -> float:
    """Decides ties: for streaming, then for the more exact encoding."""
    return 1.0 if option.cut == 0 else 0.1 - 0.005 * option.rounding


def _pushing_is_faster(problem: Problem, link: float) -> bool:
    """Whether ``auto`` would push with a link of so many bytes per second."""
    changed = problem.with_bandwidth(link)
    options = able_options(changed)
    if not options or options[0].cut:
        return bool(options)
    pays_from = _break_even(
        changed,
        streaming=1 / changed.samples_per_second(options[0]),
        mixed=1 / best_rate(seconds_matrix(changed, options)),
    )
    return _pays(pays_from, changed)


def _pays(pays_from: float | None, problem: Problem) -> bool:
    return pays_from is not None and problem.remaining_samples > pays_from


def _break_even(
    problem: Problem, *, streaming: float, mixed: float
) -> float | None:
    """Samples from which a mix is faster, by seconds per sample of both."""
    saved = streaming - mixed
    if saved <= TIE * mixed:
        return None
    return problem.push_one_off_seconds / saved


def seconds_matrix(problem: Problem, options: Sequence[Option]) -> Floats:
    """``[resources, options]``: of all of a resource, for one sample."""
    names = sorted(each.name for each in problem.resources)
    return np.array(
        [
            [problem.seconds(option, name) for option in options]
            for name in names
        ]
    )


def _fitting(problem: Problem) -> list[Option]:
    """In an order that does not depend on how they were given."""
    fitting = [each for each in problem.options if problem.fits(each)]
    if not fitting:
        raise ValueError(reasons.too_big(problem, problem.options))
    return sorted(fitting, key=lambda each: each.key)


def able_options(problem: Problem) -> list[Option]:
    """Those that fit and for which every resource is there, by cut.

    Raises:
        ValueError: none fits.
    """
    return [
        each
        for each in _fitting(problem)
        if problem.samples_per_second(each) > 0
    ]


def _least_time(
    problem: Problem, options: Sequence[Option], rule: str
) -> Plan:
    plans = [evaluate(problem, [(each, 1.0)], rule) for each in options]
    return min(
        plans,
        key=lambda plan: (
            plan.total_seconds,
            -plan.samples_per_second,
            plan.mix[0][0].key,
        ),
    )


def _normalised(
    problem: Problem, mix: Iterable[tuple[Option, float]]
) -> tuple[tuple[Option, float], ...]:
    parts = [(option, weight) for option, weight in mix if weight != 0]
    for option, weight in parts:
        if not 0 < weight < math.inf:
            raise ValueError(f"the weight of {option.label} is {weight}")
        if option not in problem.options:
            raise ValueError(f"{option.label} is none of the options")
        if not problem.fits(option):
            raise ValueError(reasons.too_big(problem, [option]))
    if not parts:
        raise ValueError("the mix is empty: every weight is 0")
    whole = math.fsum(weight for _, weight in parts)
    parts.sort(key=lambda part: part[0].key)
    return tuple((option, weight / whole) for option, weight in parts)


def _pays_from(
    problem: Problem,
    parts: Sequence[tuple[Option, float]],
    seconds: float,
) -> float | None:
    """Samples from which so many seconds per sample beat streaming's."""
    if all(option.cut == 0 for option, _ in parts):
        return None
    streaming = streaming_plan(problem)
    if streaming is None or streaming.samples_per_second == 0:
        return None if math.isinf(seconds) else 0.0
    return _break_even(
        problem, streaming=1 / streaming.samples_per_second, mixed=seconds
    )


def streaming_plan(problem: Problem) -> Plan | None:
    """As :func:`stream`; None where the client has not the memory for it."""
    fits = any(o.cut == 0 and problem.fits(o) for o in problem.options)
    return stream(problem) if fits else None
