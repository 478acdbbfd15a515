"""Chooses the routes of a job's samples and their weights.

The planner finds the mix of options with the highest throughput
(:mod:`hapi_splitter.planner.linear_program`) and streams if that mix does not
recover its startup costs. It is pure: no torch, no clock, no randomness.
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
"""Utilisation from which a resource counts as a limit.  Chosen, not measured:
far above the solver's tolerance of 1e-7, and for people a thousandth is no
reserve."""
_LINK_FACTOR = math.sqrt(10.0)
"""Chosen, not measured: two steps for a power of ten find a crossover between
the classes of links; each solves the plan again."""
_NUM_FACTORS = 8
"""Bandwidths from a ten-thousandth to ten thousand times the current one
(``_LINK_FACTOR ** _NUM_FACTORS``) are tried: no link has more."""
_NUM_HALVINGS = 10
"""Bisections, for a precision of about a thousandth."""


def solve(problem: Problem) -> Plan:
    """Returns the fastest plan (rule ``auto``).

    Ties are decided in favour of streaming, then of more exact encodings and
    fewer options. Options that do not fit are excluded and named in the
    reasons.

    Raises:
        ValueError: if no option fits or can run.
    """
    best = _fastest_mix(problem)
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
    """Predicts the result of a given mix.

    Args:
        problem: the planner's input.
        mix: options of the problem and their weights, which are scaled to
            the sum 1.
        rule: name of the plan's policy.

    Raises:
        ValueError: if there is no weight, a negative one, or an option that
            does not fit.
    """
    parts = _normalised(problem, mix)
    seconds = {
        resource.name: sum(
            weight * problem.seconds(option, resource.name)
            for option, weight in parts
        )
        for resource in problem.resources
    }
    slowest = max(seconds.values())
    cannot_run = math.isinf(slowest)
    utilisation = {
        name: float(used == slowest) if cannot_run else used / slowest
        for name, used in seconds.items()
    }
    startup = 0.0
    if any(option.cut for option, _ in parts):
        startup = problem.push_one_off_seconds
    remaining = problem.remaining_samples
    plan = Plan(
        rule=rule,
        mix=parts,
        samples_per_second=0.0 if cannot_run else 1 / slowest,
        one_off_seconds=startup,
        total_seconds=startup
        + (remaining * slowest if remaining else 0.0)
        + problem.cached_samples * problem.cached_sample_seconds,
        binding=tuple(n for n, part in utilisation.items() if part >= BINDING),
        utilisation=utilisation,
        pays_from_samples=_break_even_samples(problem, parts, slowest),
        reasons=(),
    )
    if cannot_run:
        return plan
    return replace(plan, reasons=reasons.describe(problem, plan))


def stream(problem: Problem) -> Plan:
    """Returns the plan that streams all samples.

    Raises:
        ValueError: if it does not fit into the client's memory.
    """
    return replace(static_at(problem, 0), rule="stream")


def freeze(problem: Problem) -> Plan:
    """Returns the plan that pushes the whole frozen region down.

    Raises:
        ValueError: if it does not fit, or has no encoding.
    """
    return replace(static_at(problem, problem.last_cut), rule="freeze")


def static(problem: Problem) -> Plan:
    """Returns the plan of the single option with the shortest total time.

    Raises:
        ValueError: if no option fits.
    """
    return _shortest(problem, _fitting(problem), "static")


ALTERNATIVES = ("auto", "stream", "freeze", "static")
"""Names of the plans that ``hapi plan`` compares."""


def alternatives(problem: Problem) -> dict[str, Plan]:
    """Returns the plan and its alternatives, by their names.

    Alternatives that do not fit into memory are omitted.
    """
    fitting = {
        option.cut for option in problem.options if problem.fits(option)
    }
    plans = {"auto": solve(problem)}
    if 0 in fitting:
        plans["stream"] = stream(problem)
    if problem.last_cut in fitting:
        plans["freeze"] = freeze(problem)
    return {**plans, "static": static(problem)}


def static_at(problem: Problem, cut: int) -> Plan:
    """Returns the plan of a cut in its fastest encoding.

    Raises:
        ValueError: if the cut is not among the options, or does not fit.
    """
    options = [option for option in problem.options if option.cut == cut]
    if not options:
        cuts = ", ".join(map(str, sorted({o.cut for o in problem.options})))
        raise ValueError(
            f"cut {cut} is not among the options; there are cuts {cuts}"
        )
    fitting = [option for option in options if problem.fits(option)]
    if not fitting:
        raise ValueError(reasons.too_big(problem, options))
    return _shortest(problem, fitting, "static")


def compare_precisions(
    chosen: Plan, problems_by_precision: Mapping[str, Problem]
) -> tuple[str, ...]:
    """Returns one sentence on the effect of each other precision floor.

    Args:
        chosen: the plan with the current precision floor.
        problems_by_precision: the problem with the options of other floors.
    """
    return tuple(
        reasons.other_precision(min_precision, chosen, solve(problem))
        for min_precision, problem in problems_by_precision.items()
    )


def crossover_bandwidth(problem: Problem, chosen: Plan) -> float | None:
    """Returns the bandwidth at which both are equally fast.

    The nearest crossover is returned, in bytes per second. Faster links are
    searched first for a plan that pushes down, slower ones first for
    streaming, because uploading a large package makes very slow links stream
    again. None if there is no crossover between a ten-thousandth and ten
    thousand times the current bandwidth.
    """
    current = problem.capacity(LINK)
    if not 0 < current < math.inf:
        return None
    factors = (_LINK_FACTOR, 1 / _LINK_FACTOR)
    for factor in factors if chosen.pushes else reversed(factors):
        near = current
        for _ in range(_NUM_FACTORS):
            far = near * factor
            if _pushdown_is_faster(problem, far) != chosen.pushes:
                return _bisect_crossover(problem, chosen.pushes, near, far)
            near = far
    return None


def _bisect_crossover(
    problem: Problem, pushes: bool, near: float, far: float
) -> float:
    low, high = math.log(near), math.log(far)
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        if _pushdown_is_faster(problem, math.exp(middle)) == pushes:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def _fastest_mix(problem: Problem) -> Plan:
    """Returns the mix with the highest rate, ignoring startup costs."""
    options = able_options(problem)
    if not options:
        missing = [r.name for r in problem.resources if not r.capacity]
        raise ValueError(
            f"no option can run: there is no {' and no '.join(missing)}"
        )
    seconds = seconds_matrix(problem, options)
    weights = best_mix(seconds, np.array([_preference(o) for o in options]))
    return evaluate(
        problem,
        ((o, float(w)) for o, w in zip(options, weights, strict=True)),
        "auto",
    )


def _preference(option: Option) -> float:
    """Ranks equally fast options: streaming, then more exact encodings."""
    return 1.0 if option.cut == 0 else 0.1 - 0.005 * option.rounding


def _pushdown_is_faster(problem: Problem, link: float) -> bool:
    """Returns True if ``auto`` would push down at a bandwidth."""
    changed = problem.with_bandwidth(link)
    options = able_options(changed)
    if not options or options[0].cut:
        return bool(options)
    break_even = _break_even(
        changed,
        streaming=1 / changed.samples_per_second(options[0]),
        mixed=1 / best_rate(seconds_matrix(changed, options)),
    )
    return _pays(break_even, changed)


def _pays(break_even: float | None, problem: Problem) -> bool:
    return break_even is not None and problem.remaining_samples > break_even


def _break_even(
    problem: Problem, *, streaming: float, mixed: float
) -> float | None:
    """Returns the break-even samples from seconds per sample of both."""
    saved = streaming - mixed
    if saved <= TIE * mixed:
        return None
    return problem.push_one_off_seconds / saved


def seconds_matrix(problem: Problem, options: Sequence[Option]) -> Floats:
    """Returns seconds of whole resources, ``[resources, options]``."""
    names = sorted(resource.name for resource in problem.resources)
    return np.array(
        [
            [problem.seconds(option, name) for option in options]
            for name in names
        ]
    )


def _fitting(problem: Problem) -> list[Option]:
    """Returns options that fit, sorted."""
    fitting = [option for option in problem.options if problem.fits(option)]
    if not fitting:
        raise ValueError(reasons.too_big(problem, problem.options))
    return sorted(fitting, key=lambda option: option.key)


def able_options(problem: Problem) -> list[Option]:
    """Returns options that fit and whose resources exist, sorted by cut.

    Raises:
        ValueError: if no option fits.
    """
    return [
        option
        for option in _fitting(problem)
        if problem.samples_per_second(option) > 0
    ]


def _shortest(problem: Problem, options: Sequence[Option], rule: str) -> Plan:
    plans = [evaluate(problem, [(option, 1.0)], rule) for option in options]
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
            raise ValueError(f"{option.label} is not among the options")
        if not problem.fits(option):
            raise ValueError(reasons.too_big(problem, [option]))
    if not parts:
        raise ValueError("the mix is empty: every weight is 0")
    total = math.fsum(weight for _, weight in parts)
    parts.sort(key=lambda part: part[0].key)
    return tuple((option, weight / total) for option, weight in parts)


def _break_even_samples(
    problem: Problem,
    parts: Sequence[tuple[Option, float]],
    seconds: float,
) -> float | None:
    """Returns the number of samples from which a mix beats streaming."""
    if all(option.cut == 0 for option, _ in parts):
        return None
    streaming = streaming_plan(problem)
    if streaming is None or streaming.samples_per_second == 0:
        return None if math.isinf(seconds) else 0.0
    return _break_even(
        problem, streaming=1 / streaming.samples_per_second, mixed=seconds
    )


def streaming_plan(problem: Problem) -> Plan | None:
    """Returns the streaming plan; None if it does not fit into memory."""
    fits = any(o.cut == 0 and problem.fits(o) for o in problem.options)
    return stream(problem) if fits else None
