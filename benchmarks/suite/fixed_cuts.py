"""Fixed cuts to measure, and the planner's expectations."""

from __future__ import annotations

from typing import Any

from benchmarks.suite.baseline_policies import PolicyInputs, baseline_plans
from benchmarks.suite.contenders import AUTO, STREAM
from hapi_client.plan_report.plan_study import PlanStudy
from hapi_splitter.planner.plan import LINK, RAW, Option, solve, static_at


def outlook(
    advice: PlanStudy, *, batch_size: int, input_bytes: int
) -> dict[str, Any]:
    """Cuts to measure, besides streaming and ``auto``.

    Args:
        advice: for the cell's link.
        batch_size: of the training loop.
        input_bytes: of a decoded sample.

    Returns:
        ``cuts``: each with ``name``, ``cut``, its fastest ``encoding`` and
        ``link_bytes`` per sample; ``policies``: baseline policy to the name
        of its cut; ``predicted``: samples per second by name.
    """
    problem = advice.report.problem
    plans = baseline_plans(
        problem,
        PolicyInputs.of(
            advice.facts.cuts,
            advice.server,
            advice.facts.samples,
            batch_size=batch_size,
            input_bytes=input_bytes,
        ),
    )
    fitting = {o.cut for o in problem.options if o.cut and problem.fits(o)}
    options: dict[int, Option] = {
        cut: static_at(problem, cut).mix[0][0] for cut in sorted(fitting)
    }
    policies = {name: plan.mix[0][0] for name, plan in plans.items()}
    streamed = next(o for o in problem.options if o.route == (0, RAW))
    return {
        "cuts": [
            {
                "name": name_of(cut),
                "cut": cut,
                "encoding": option.encoding,
                "link_bytes": option.use.get(LINK, 0.0),
            }
            for cut, option in options.items()
        ],
        "policies": {n: name_of(policy.cut) for n, policy in policies.items()},
        "predicted": {
            **{
                name_of(cut): problem.samples_per_second(option)
                for cut, option in options.items()
            },
            STREAM: problem.samples_per_second(streamed),
            AUTO: solve(problem).samples_per_second,
        },
    }


def name_of(cut: int) -> str:
    """Name of a contender with a fixed cut; cut 0 streams."""
    return f"cut-{cut}" if cut else STREAM
