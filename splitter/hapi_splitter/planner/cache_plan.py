"""Plans where the store keeps what it has computed (pure).

The frozen layers give the same features in every epoch, so what was pushed
once and kept comes without the worker the next time. The mix that gets through
this epoch soonest is then not always the one that gets through all epochs
soonest: features of a deeper cut take longer to compute, once, and are less to
send and to finish in every epoch after.

Let a mix take ``t`` seconds for a sample, and ``k`` where its features are
kept, and let it push the part ``q`` of what is not kept, at random. After
``n`` epochs ``(1 - q) ** n`` is not kept yet, so that ``E`` epochs compute
``(1 - (1 - q) ** E) / q`` epochs' worth of samples, and find the rest. What
was kept in this epoch is not asked for in this epoch any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hapi_splitter.planner.linear_program import TIE, Floats
from hapi_splitter.planner.plan import (
    able_options,
    evaluate,
    seconds_matrix,
    solve,
)
from hapi_splitter.planner.problem import (
    CLIENT_CPU,
    CLIENT_DEVICE,
    LINK,
    SERVER_CPU,
    Option,
    Plan,
    Problem,
    Route,
)
from hapi_splitter.planner.resource_use import SERVING, stages
from hapi_splitter.units import seconds_text

FEW_COST = 0.4
"""Of the time of a sample that is dealt among samples that are kept, as they
are more: on two cores, epochs of which 60, 34 and 20 % were still to be
dealt took 27, 25 and 37 % more for these than epochs without any that was
kept. They are few, and their ways end at different times."""
_PARTS: Floats = np.linspace(0.05, 1.0, 20)
"""Of the samples that may be pushed, of which the best is taken."""


@dataclass(frozen=True)
class Keeping:
    """What a store keeps of one job's features.

    A round is an epoch, or as many as there are variants of each sample, of
    which each epoch asks for another one: random changes that repeat.

    Attributes:
        shares: by cut and encoding, the part of what a round asks for that
            is kept now, 0 to 1; 0 if not named.
        before: likewise, that was kept when the round under way began.
        chance: that what is computed is kept and found again, 0 to 1.
        chances: by cut and encoding, where another one is known.
        variants: of each sample.
        rest: of the round under way, the part still to come, 0 to 1.
        whole: part of the samples that come in spans as the store keeps
            them, and not in pieces that no other epoch has.
    """

    shares: Mapping[Route, float] = field(default_factory=dict)
    before: Mapping[Route, float] = field(default_factory=dict)
    chance: float = 1.0
    chances: Mapping[Route, float] = field(default_factory=dict)
    variants: int = 1
    rest: float = 1.0
    whole: float = 1.0

    def chance_of(self, option: Option) -> float:
        """That what is computed of an option is kept and found again."""
        return self.chances.get(option.way, self.chance)


def kept_seconds(problem: Problem, option: Option) -> float:
    """For a sample whose features are kept, at the scarcest resource.

    Swift is charged as if it still had to read the sample, which is more
    than it does.
    """
    serving = stages(problem, option)[SERVER_CPU].get(SERVING, 0.0)
    own = (LINK, CLIENT_CPU, CLIENT_DEVICE)
    return max(serving, *(problem.seconds(option, name) for name in own))


def seconds_to_come(problem: Problem, plan: Plan, keeping: Keeping) -> float:
    """For all samples to come, with what will be kept by then.

    Args:
        problem: of the plan, with the epochs that are still to come.
        plan: any mix of the problem's options.
        keeping: what is kept, and will be.
    """
    if not plan.samples_per_second:
        return plan.total_seconds
    seconds, _ = _of_plan(problem, plan, keeping)
    return plan.one_off_seconds + problem.num_samples * seconds


def gain_with_kept(
    problem: Problem, other: Plan, plan: Plan, keeping: Keeping
) -> float:
    """By which factor a plan is sooner through with what is not kept yet.

    What is kept and read under both does not count. Where that is all, by
    which factor the plan's mix is faster.

    Args:
        problem: of both, with the epochs that are still to come.
        other: a plan that can run.
        plan: likewise.
        keeping: what is kept, and will be.
    """
    (sooner, read), (later, other_read) = (
        _of_plan(problem, each, keeping) for each in (plan, other)
    )
    common = min(read, other_read)
    if sooner - common <= TIE * sooner or later - common <= TIE * later:
        return plan.samples_per_second / other.samples_per_second
    once, other_once = (
        each.one_off_seconds / max(problem.num_samples, 1)
        for each in (plan, other)
    )
    return (other_once + later - common) / (once + sooner - common)


def _of_plan(
    problem: Problem, plan: Plan, keeping: Keeping
) -> tuple[float, float]:
    """As :func:`_epochs`."""
    added = [
        (part * keeping.chance_of(option), kept_seconds(problem, option))
        for option, part in plan.mix
        if option.cut
    ]
    grows = sum(part for part, _ in added)
    kept = sum(part * each for part, each in added)
    seconds, reading = _epochs(
        problem,
        keeping,
        np.array(1 / plan.samples_per_second),
        np.array(grows),
        np.array(kept / grows if grows else 0.0),
    )
    return float(seconds), float(reading)


def solve_keeping(problem: Problem, keeping: Keeping) -> Plan:
    """The plan that is through with all samples to come soonest.

    The fastest mix, or streaming and one cut, which another epoch finds.

    Args:
        problem: with the epochs that are still to come.
        keeping: what is kept, and will be.

    Raises:
        ValueError: as :func:`hapi_splitter.planner.plan.solve`.
    """
    fastest = solve(problem)
    options = able_options(problem)
    pushed = [option for option in options if option.cut]
    if not pushed:
        return fastest
    seconds = seconds_matrix(problem, options)
    parts = _PARTS[:, None]
    if options[0].cut:
        parts, steady = parts[-1:], seconds.max(axis=0)[None]
    else:
        # [parts, resources, options], of which the scarcest resource counts.
        mixed = (
            parts[..., None] * seconds[:, 1:]
            + (1 - parts[..., None]) * seconds[:, :1]
        )
        steady = mixed.max(axis=1)
    to_come, _ = _epochs(
        problem,
        keeping,
        steady,
        parts * np.array([keeping.chance_of(each) for each in pushed]),
        np.array([kept_seconds(problem, each) for each in pushed]),
    )
    # Where all is kept, no part is better than another: the fastest, then.
    judged = to_come + TIE * problem.epochs * steady
    row, column = np.unravel_index(judged.argmin(), judged.shape)
    part = float(parts[row, 0])
    mix = [(pushed[column], part)]
    if part < 1:
        mix.append((options[0], 1 - part))
    chosen = evaluate(problem, mix, fastest.rule)
    before = seconds_to_come(problem, fastest, keeping)
    after = seconds_to_come(problem, chosen, keeping)
    if after >= before * (1 - TIE):
        return fastest
    first, *others = chosen.reasons
    why = (
        "What is pushed is kept for later epochs: what is to come takes "
        f"{seconds_text(after)}, and {seconds_text(before)} with "
        f"{fastest.label}."
    )
    return replace(chosen, reasons=(first, why, *others))


def _epochs(
    problem: Problem,
    keeping: Keeping,
    steady: Floats,
    grows: Floats,
    kept: Floats,
) -> tuple[Floats, Floats]:
    """Seconds for each sample of the data set, over all epochs to come, and
    those of them in which what is kept now is read.

    Args:
        problem: what is to come of it.
        keeping: what is kept.
        steady: seconds for a sample, of a mix.
        grows: part of the samples that the mix computes and that is kept.
        kept: seconds for one of these in later epochs.
    """
    # In rounds, and of all that a round asks for.
    visits = problem.epochs / keeping.variants
    rest = min(keeping.rest, visits)
    later = visits - rest
    before, saved_rest = _covered(problem, keeping.before, steady)
    covered, saved_later = _covered(problem, keeping.shares, steady)
    fresh = np.minimum(grows * rest * (1 - before), 1 - covered)
    missing = 1 - covered - fresh
    grows = np.maximum(grows, 1e-9)
    computed = np.minimum(later, (1 - (1 - grows) ** later) / grows)
    found = fresh * later + missing * (later - computed)
    saved = rest * saved_rest + later * saved_later
    saved = saved + np.maximum(0.0, steady - kept) * found
    dealt = missing * computed
    beside = (1 - dealt / later) if later else 0.0
    few = rest * (1 - before) * before + dealt * beside
    saved = saved - FEW_COST * steady * few
    seconds: Floats = visits * steady - keeping.whole * saved
    reading: Floats = keeping.whole * (
        rest * (before * steady - saved_rest)
        + later * (covered * steady - saved_later)
    )
    return keeping.variants * seconds, keeping.variants * reading


def _covered(
    problem: Problem, shares: Mapping[Route, float], steady: Floats
) -> tuple[Floats, Floats]:
    """Which part of the samples is kept, and what that saves of a sample.

    On the cut that is read fastest, and only where that is faster than the
    mix. Which samples are kept at one cut says nothing of another one.
    """
    covered, saved = np.zeros_like(steady), np.zeros_like(steady)
    kept = [
        (kept_seconds(problem, option), shares[option.way])
        for option in problem.options
        if shares.get(option.way)
    ]
    for seconds, share in sorted(kept):
        part = np.where(seconds < steady, share * (1 - covered), 0.0)
        saved = saved + part * (steady - seconds)
        covered = covered + part
    return covered, saved
