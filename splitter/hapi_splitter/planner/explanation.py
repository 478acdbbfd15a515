"""Explains a plan in sentences for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hapi_splitter.planner.problem import (
    CLIENT_CPU,
    CLIENT_DEVICE,
    LINK,
    SERVER_CPU,
    SERVER_DEVICE,
    UNSEEN_LINK,
    Option,
    Plan,
    Problem,
)
from hapi_splitter.units import (
    bytes_text,
    link_text,
    number_text,
    percent_text,
    seconds_text,
)

_ACTIVITIES = {
    LINK: ("carries the stored samples", "carries features of {}"),
    SERVER_CPU: (
        "reads and sends the samples",
        "reads, decodes and encodes for {}",
    ),
    SERVER_DEVICE: ("", "computes the frozen layers up to {}"),
    CLIENT_CPU: (
        "decodes samples and prepares batches",
        "unpacks features of {} and prepares batches",
    ),
    CLIENT_DEVICE: (
        "computes all layers for streamed samples",
        "computes what comes after {}",
    ),
}
"""Activities of a resource: for streaming, and for a cut."""
_EQUAL_RATIO = 1.005
"""Speeds with a smaller ratio are reported as equal: ratios have three digits
in texts, which would show 1."""


def explain(
    problem: Problem,
    chosen: Plan,
    best: Plan,
    streaming: Plan | None,
    single: Plan,
    crossover: float | None,
) -> tuple[str, ...]:
    """Returns all sentences about a plan.

    Args:
        problem: the planner's input.
        chosen: the chosen plan.
        best: the fastest plan if startup costs are ignored.
        streaming: the streaming plan; None if it does not fit.
        single: the best plan of a single option.
        crossover: crossover bandwidth in bytes per second, or None.
    """
    sentences = [
        _describe_routes(chosen),
        *_describe_limits(problem, chosen),
        _describe_speed(chosen, streaming, single),
        *_describe_startup(problem, chosen, best, streaming),
        *_describe_link(problem, chosen, streaming, crossover),
        *_describe_excluded(problem),
    ]
    return tuple(sentences)


def describe(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """Returns sentences about a plan's routes and limiting resources."""
    return (_describe_routes(plan), *_describe_limits(problem, plan))


def other_precision(min_precision: str, chosen: Plan, other: Plan) -> str:
    """Compares a plan with that of another precision floor."""
    condition = f"With --min-precision {min_precision}"
    if not (chosen.pushes or other.pushes):
        return f"{condition} it would also stream."
    if not chosen.total_seconds:
        return f"{condition} nothing would change: no samples remain."
    ratio = other.total_seconds / chosen.total_seconds
    if 1 / _EQUAL_RATIO < ratio < _EQUAL_RATIO:
        return f"{condition} it would be no faster."
    plan = f"{condition} the plan would be {other.label}"
    if ratio > 1:
        return f"{plan}, {ratio:.3g} times as long: {_speed(other)}."
    return f"{plan}, {1 / ratio:.3g} times as fast: {_speed(other)}."


def too_big(problem: Problem, options: Sequence[Option]) -> str:
    """Returns an error message for options none of which fits."""
    smallest = min(options, key=lambda o: (o.client_bytes, o.server_bytes))
    return (
        f"{_names(options)} cannot run for lack of memory: {smallest.label} "
        f"needs {_missing_memory(problem, smallest)}; take a smaller batch or "
        f"model, or give more memory"
    )


def _describe_routes(plan: Plan) -> str:
    if not plan.pushes:
        return (
            "Streaming: the client reads all samples as they are stored and "
            "computes all layers."
        )
    parts = []
    for option, weight in plan.mix:
        share = "all" if len(plan.mix) == 1 else percent_text(weight)
        if option.cut:
            parts.append(
                f"{share} of the samples are pushed down at cut {option.cut} "
                f"and sent as {option.encoding}"
            )
        else:
            parts.append(f"{share} of the samples are streamed")
    sentence = ", ".join(parts)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _describe_limits(problem: Problem, plan: Plan) -> list[str]:
    sentences = []
    for name in plan.binding:
        seconds = [
            (option, weight * problem.seconds(option, name))
            for option, weight in plan.mix
            if option.use.get(name)
        ]
        total = sum(part for _, part in seconds)
        activities = [
            _activity(problem, name, option)
            + (f" ({percent_text(part / total)})" if len(seconds) > 1 else "")
            for option, part in seconds
        ]
        sentences.append(
            f"The {name} is busy all the time: it {' and '.join(activities)}."
        )
    return sentences


def _activity(problem: Problem, resource: str, option: Option) -> str:
    streamed, pushed = _ACTIVITIES.get(
        resource, ("serves the samples", "serves {}")
    )
    if resource == SERVER_CPU and problem.server_threads:
        pushed = "reads, decodes, computes and encodes for {}"
    if resource == CLIENT_CPU and problem.client_threads:
        streamed = "decodes samples, computes all layers and trains"
        pushed = "unpacks features of {}, computes what follows and trains"
    return pushed.format(f"cut {option.cut}") if option.cut else streamed


def _describe_speed(chosen: Plan, streaming: Plan | None, single: Plan) -> str:
    sentence = f"Expected: {_speed(chosen)}"
    if not chosen.pushes:
        return f"{sentence}."
    if streaming is None:
        sentence += "; streaming does not fit into the client's memory"
    else:
        sentence += f", {_speedup(chosen, streaming)} streaming"
    if len(chosen.mix) > 1:
        sentence += (
            f" and {_speedup(chosen, single)} the best single choice, "
            f"{single.label}"
        )
    return f"{sentence}."


def _describe_startup(
    problem: Problem, chosen: Plan, best: Plan, streaming: Plan | None
) -> list[str]:
    if not best.pushes:
        return [
            "No cut is faster, alone or mixed with streaming, for any number "
            "of samples."
        ]
    if (
        not best.one_off_seconds
        or streaming is None
        or best.pays_from_samples is None
    ):
        return []
    cost = seconds_text(best.one_off_seconds)
    break_even = number_text(math.ceil(best.pays_from_samples))
    remaining = number_text(problem.remaining_samples)
    if chosen.pushes:
        return [
            f"Push-down has a startup cost of {cost}; it pays off from "
            f"{break_even} samples, and {remaining} remain."
        ]
    return [
        f"The plan {best.label} would reach {_speed(best)}, but its startup "
        f"cost of {cost} pays off only from {break_even} samples, and "
        f"{remaining} remain."
    ]


def _describe_link(
    problem: Problem,
    chosen: Plan,
    streaming: Plan | None,
    crossover: float | None,
) -> list[str]:
    if streaming is None or LINK not in {r.name for r in problem.resources}:
        return []
    now = problem.capacity(LINK)
    known = (
        f"it has {link_text(now)}"
        if now < UNSEEN_LINK
        else "no limit was observed"
    )
    if crossover is None:
        if now >= UNSEEN_LINK:
            return []
        choice = "push" if chosen.pushes else "stream"
        return [
            f"It would also {choice} with a much faster or slower link "
            f"({known})."
        ]
    faster = "faster" if crossover > now else "slower"
    effect = "make it stream" if chosen.pushes else "make push-down pay"
    return [
        f"A link {faster} than {link_text(crossover)} would {effect} "
        f"({known})."
    ]


def _describe_excluded(problem: Problem) -> list[str]:
    excluded = [o for o in problem.options if not problem.fits(o)]
    if not excluded:
        return []
    first = min(excluded, key=lambda option: option.key)
    return [
        f"Excluded for lack of memory: {_names(excluded)}; {first.label} "
        f"needs {_missing_memory(problem, first)}."
    ]


def _missing_memory(problem: Problem, option: Option) -> str:
    amounts = (
        ("server", option.server_bytes, problem.server_limit_bytes),
        ("client", option.client_bytes, problem.client_limit_bytes),
    )
    return " and ".join(
        f"{bytes_text(needed)} of the {tier}'s {bytes_text(limit)}"
        for tier, needed, limit in amounts
        if needed > limit
    )


def _names(options: Sequence[Option]) -> str:
    cuts = sorted({option.cut for option in options})
    pushed = [str(cut) for cut in cuts if cut]
    names = ["stream"] if 0 in cuts else []
    if pushed:
        names.append(
            f"cut{'s' if len(pushed) > 1 else ''} {', '.join(pushed)}"
        )
    return " and ".join(names)


def _speed(plan: Plan) -> str:
    return f"{number_text(plan.samples_per_second)} samples/s"


def _speedup(plan: Plan, other: Plan) -> str:
    if other.samples_per_second == 0:
        return "infinitely faster than"
    ratio = plan.samples_per_second / other.samples_per_second
    if ratio < _EQUAL_RATIO:
        return "as fast as"
    return f"{ratio:.3g} times"
