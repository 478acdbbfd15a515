"""Plans where the store keeps what it has computed (pure).

The frozen layers give the same features in every epoch, so what was pushed
once and kept comes without the worker the next time. The mix that gets through
this epoch soonest is then not always the one that gets through all epochs
soonest: features of a deeper cut take longer to compute, once, and are less to
send and to finish in every epoch after.

Let a mix take ``t`` seconds for a sample, and ``k`` where its features are
kept, and let it push the part ``q`` of what is not kept, at random. After
``n`` epochs ``(1 - q) ** n`` is not kept yet, so that ``E`` epochs compute
``(1 - (1 - q) ** E) / q`` epochs' worth of samples, and find the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hapi_splitter.mixture import TIE, Floats
from hapi_splitter.plan import able_options, evaluate, seconds_matrix, solve
from hapi_splitter.problem import (
    CLIENT_CPU,
    CLIENT_DEVICE,
    LINK,
    SERVER_CPU,
    Option,
    Plan,
    Problem,
)
from hapi_splitter.quantities import seconds_text
from hapi_splitter.work import SERVING, stages

_PARTS: Floats = np.linspace(0.05, 1.0, 20)
"""Of the samples that may be pushed, of which the best is taken."""


@dataclass(frozen=True)
class Keeping:
    """What a store keeps of one job's features.

    Attributes:
        shares: by cut and encoding, the part of all features that its epochs
            ask for that is kept already, 0 to 1; 0 if not named.
        chance: that what is computed is kept, 0 to 1.
        variants: of each sample, of which an epoch asks for one and the next
            epoch for the next one: random changes that repeat.
    """

    shares: Mapping[tuple[int, str], float] = field(default_factory=dict)
    chance: float = 1.0
    variants: int = 1

    def share(self, option: Option) -> float:
        """Of an option."""
        return self.shares.get((option.cut, option.encoding), 0.0)


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
    pushed = [(option, part) for option, part in plan.mix if option.cut]
    whole = sum(part for _, part in pushed)
    if not whole or not plan.samples_per_second:
        return plan.total_seconds
    kept = sum(part * kept_seconds(problem, option) for option, part in pushed)
    epochs = _epochs(
        problem.epochs,
        np.array(1 / plan.samples_per_second),
        np.array(kept / whole),
        np.array(whole),
        np.array(min(1.0, sum(keeping.share(o) for o, _ in pushed))),
        keeping,
    )
    return plan.one_off_seconds + problem.num_samples * float(epochs)


def solve_keeping(problem: Problem, keeping: Keeping) -> Plan:
    """The plan that is through with all samples to come soonest.

    The fastest mix, or streaming and one cut, which another epoch finds.

    Args:
        problem: with the epochs that are still to come.
        keeping: what is kept, and will be.

    Raises:
        ValueError: as :func:`hapi_splitter.plan.solve`.
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
    to_come = _epochs(
        problem.epochs,
        steady,
        np.array([kept_seconds(problem, each) for each in pushed]),
        parts,
        np.array([keeping.share(each) for each in pushed]),
        keeping,
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
    if after >= before:
        return fastest
    first, *others = chosen.reasons
    why = (
        "What is pushed is kept for later epochs: what is to come takes "
        f"{seconds_text(after)}, and {seconds_text(before)} with "
        f"{fastest.label}."
    )
    return replace(chosen, reasons=(first, why, *others))


def _epochs(
    epochs: float,
    steady: Floats,
    kept: Floats,
    pushed: Floats,
    share: Floats,
    keeping: Keeping,
) -> Floats:
    """Seconds for each sample of the data set, over all epochs to come.

    Args:
        epochs: to come.
        steady: seconds for a sample, of the mix.
        kept: seconds for a sample that is kept.
        pushed: part of the samples that is pushed, 0 to 1.
        share: part that is kept now.
        keeping: for the rest.
    """
    # Of each variant of a sample.
    visits = epochs / keeping.variants
    grows = np.maximum(pushed * keeping.chance, 1e-9)
    computed = np.minimum(visits, (1 - (1 - grows) ** visits) / grows)
    found = epochs - keeping.variants * (1 - share) * computed
    saved: Floats = np.maximum(0.0, steady - kept) * found
    seconds: Floats = epochs * steady - saved
    return seconds
