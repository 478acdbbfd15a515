"""Goals and what became of them, and what the figures do not show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.suite.report.bound import bound_goals
from benchmarks.suite.report.document import Listing, Part, Table, Text
from benchmarks.suite.report.figures import verdict

NOT_MEASURED = "not measured"
_NOT_SHOWN = (
    "Two tiers on one machine, a core each unless it says otherwise above:"
    " caches and memory bandwidth are shared, and nothing shows how many"
    " cores, or a network of many switches, behave.",
    "The link has a rate and no latency, no loss and no other traffic.",
    "Swift keeps its objects in memory-backed disks, three servers' work on"
    " one core; disks, SSDs or erasure coding would make the storage side"
    " slower for everybody.",
    "Networks have random weights: rates do not depend on them, what"
    " compression saves on features does, and accuracy was not compared but"
    " where this page says so.",
    "Batches of 8 to 16 samples, three networks of torchvision (vit_b_16 at"
    " 112 pixels, a quarter of its usual tokens), photographs of one kind: as"
    " many as the tars hold, repeated where an epoch has more.",
    "Worker and client compute on CPUs, except where a part says otherwise.",
    "Nobody uses ``torch.compile``, nor JPEG decoding at reduced resolution"
    " (draft mode), which would make decoding cheaper for all.",
    "Rates of epoch 1 are those of a warm job that keeps nothing: processes,"
    " workers and plans have been at work before.  What a run takes from its"
    " very start is in the whole runs only.",
    "Intervals are by bootstrap over the rounds.  With five of these they"
    " reach from the lowest to the highest round, and rounds on one machine,"
    " whose speed drifts, do not depend on chance alone.",
    "Opponents run with the best of the settings that are listed, not of all"
    " that exist.",
)


def goals_part(
    sections: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]
) -> Part:
    """A line for each goal of each experiment.

    Args:
        sections: of the results, by experiment.
        titles: of all experiments, in order.
    """
    goals = {name: each.get("met") for name, each in sections.items()}
    if "stages" in sections:
        goals["stages"] = bound_goals(sections["stages"], sections.get("grid"))
    rows = [
        row
        for name, title in titles.items()
        for row in _rows(title, sections.get(name), goals.get(name))
    ]
    return Part(
        "Goals",
        [
            Text("As the experiments themselves judge their figures."),
            Table(("Experiment", "Goal", "Verdict"), rows, words=3),
        ],
    )


def _rows(
    title: str,
    section: Mapping[str, Any] | None,
    goals: Mapping[str, bool | None] | None,
) -> Iterator[tuple[str, str, str]]:
    if section is None or isinstance(section.get("absent"), str):
        yield title, "-", NOT_MEASURED
        return
    if not section["complete"]:
        title = f"{title} (not measured to its end)"
    if not goals:
        yield title, "-", verdict(None) if goals is None else "has no goal"
        return
    for goal, is_met in goals.items():
        yield title, goal, verdict(is_met)


def not_shown_part() -> Part:
    """What a reader must not conclude."""
    return Part("What these figures do not show", [Listing(_NOT_SHOWN)])
