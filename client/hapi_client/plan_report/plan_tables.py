"""A plan as tables, summary and JSON.

The JSON form (:func:`report_body`) has these stable keys:

``plan``
    Name of the rule that made the plan; ``plans`` has it.
``plans``
    By rule: ``mix`` (list of ``cut``, ``encoding``, ``share``),
    ``samples_per_second``, ``one_off_seconds``, ``total_seconds``,
    ``times_plan`` (its total over the plan's), ``binding`` (list),
    ``utilisation`` (by resource), ``pays_from_samples`` (null: never),
    ``reasons`` (list).
``resources``
    List of ``name``, ``capacity``, ``unit``.
``cuts``
    List, cut 0 first, of ``cut``, ``name``, ``op``, ``shape``,
    ``float32_bytes``, ``candidate`` (true if measured), ``share`` and
    ``options``: list of ``encoding``, ``bytes``, ``seconds`` (by resource,
    with all its capacity), ``samples_per_second``, ``server_bytes``,
    ``client_bytes``, ``fits``.
``samples``, ``epochs``, ``computed_epochs``, ``push_one_off_seconds``
    Amount of training that the totals are for, and the part of it for which
    features are computed: the others are cached on the client.
``server_limit_bytes``, ``client_limit_bytes``
    Memory that an option may use.

Seconds and bytes are per sample, except for memory, startup costs and totals.
Infinite numbers are null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hapi_client.reports.table import Table
from hapi_protocol.encodings import Encoding
from hapi_splitter.planner.costs import CutFacts
from hapi_splitter.planner.plan import ALTERNATIVES
from hapi_splitter.planner.problem import Option, Plan, Problem
from hapi_splitter.units import (
    bytes_text,
    number_text,
    percent_text,
    seconds_text,
)

ASSUMED = "assumed: "
"""Prefix of notes on values that were not measured."""
_NAME_WIDTH = 36
_CUTS_NOTE = (
    "Sizes are bytes of one sample on the link, in the best compression of "
    "each number format. share: part of the samples that the plan sends "
    "through the cut."
)
_COSTS_NOTE = (
    "For one sample in this encoding (the plan's, otherwise the fastest): "
    "bytes on the link, then milliseconds of each resource; the largest "
    "limits the throughput. Memory is for one sample; ! marks more than is "
    "available."
)


@dataclass(frozen=True)
class Report:
    """A plan with its alternatives and costs.

    Attributes:
        cuts: all cuts, first to last.
        problem: the planning problem.
        plans: by rule, at least ``chosen``, from
            :func:`hapi_splitter.planner.plan.alternatives`.
        chosen: the rule whose plan is used.
        model: name, for titles.
        notes: sentences on measurements and assumptions.
    """

    cuts: tuple[CutFacts, ...]
    problem: Problem
    plans: Mapping[str, Plan]
    chosen: str = "auto"
    model: str = "model"
    notes: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        return self.plans[self.chosen]

    @property
    def raw_bytes(self) -> float:
        """Mean size of a stored sample."""
        streaming = next(o for o in self.problem.options if o.cut == 0)
        return streaming.use.get("link", 0.0)

    def options(self, cut: int) -> tuple[Option, ...]:
        """Returns the options of a cut, fastest first."""
        return tuple(
            sorted(
                (o for o in self.problem.options if o.cut == cut),
                key=lambda o: (-self.problem.samples_per_second(o), o.key),
            )
        )

    def shown(self, cut: int) -> Option | None:
        """Returns a cut's option: the plan's, else the fastest.

        None if the cut was not measured.
        """
        used = (option for option, _ in self.plan.mix if option.cut == cut)
        return next(used, next(iter(self.options(cut)), None))

    def share(self, cut: int) -> float:
        """Returns the fraction of samples that the plan sends through it."""
        return math.fsum(w for option, w in self.plan.mix if option.cut == cut)


def cut_table(report: Report, *, every: bool = False) -> Table:
    """Sizes at each cut: a row for streaming and one per cut.

    Args:
        report: report of one plan.
        every: include cuts that were not measured; of these only module,
            operator, shape and float32 size are known.
    """
    dtypes = {
        Encoding.parse(option.encoding).dtype
        for option in report.problem.options
        if option.cut
    }
    # Largest first.
    columns = sorted(dtypes, key=lambda d: (-Encoding(d).value_bytes, d))
    stream = f"stream: the sample, {bytes_text(report.raw_bytes)}"
    rows = []
    for cut in report_body(report)["cuts"]:
        if every or cut["candidate"]:
            sizes = _sizes(cut)
            rows.append(
                (
                    str(cut["cut"]),
                    shortened(cut["name"], _NAME_WIDTH)
                    if cut["cut"]
                    else stream,
                    op_text(cut["op"] or ""),
                    "x".join(map(str, cut["shape"] or ())),
                    *(
                        bytes_text(sizes[d]) if d in sizes else ""
                        for d in columns
                    ),
                    _share_text(cut["share"]),
                )
            )
    header = ("cut", "module", "operator", "shape", *columns, "share")
    return Table(header, tuple(rows), 4, _CUTS_NOTE)


def cost_table(report: Report) -> Table:
    """Costs of streaming and of each measured cut."""
    problem = report.problem
    resources = [resource.name for resource in problem.resources]
    rows = []
    for cut in (0, *(facts.index for facts in report.cuts)):
        option = report.shown(cut)
        if option is None:
            continue
        seconds = [problem.seconds(option, name) for name in resources]
        rows.append(
            (
                str(cut),
                option.encoding,
                bytes_text(option.use.get("link", 0.0)),
                *(number_text(1000 * s) if s else "-" for s in seconds),
                _memory(option.server_bytes, problem.server_limit_bytes),
                _memory(option.client_bytes, problem.client_limit_bytes),
                _share_text(report.share(cut)),
            )
        )
    header = (
        *("cut", "encoding", "size", *resources),
        *("server mem", "client mem", "share"),
    )
    return Table(header, tuple(rows), 2, _COSTS_NOTE)


def plans_table(report: Report) -> Table:
    """Throughput and total time of the plan and its alternatives."""
    chosen = report.plan
    rows = [
        (
            name,
            plan.label,
            number_text(plan.samples_per_second),
            seconds_text(plan.one_off_seconds),
            seconds_text(plan.total_seconds),
            f"{plan.total_seconds / chosen.total_seconds:.2f}"
            if chosen.total_seconds
            else "-",
            ", ".join(plan.binding),
        )
        for name, plan in report.plans.items()
    ]
    header = (
        *("plan", "routes", "samples/s", "once", "total"),
        *(f"times {report.chosen}", "limited by"),
    )
    problem = report.problem
    note = (
        f"Totals are for {number_text(problem.remaining_samples)} samples, "
        "startup costs included"
    )
    if problem.cached_samples:
        note += (
            f", and {number_text(problem.cached_samples)} that the client "
            "has cached by then"
        )
    note += "."
    if missing := set(ALTERNATIVES) - set(report.plans):
        note += (
            " Not shown, as their cut does not fit into memory: "
            f"{', '.join(sorted(missing))}."
        )
    return Table(header, tuple(rows), 2, note)


def summary(report: Report) -> tuple[str, ...]:
    """Returns the plan and its reasons, one line each."""
    return (f"Plan: {report.plan.label}", *report.plan.reasons)


def report_body(report: Report) -> dict[str, Any]:
    """Returns the JSON form; the module's docstring has the keys."""
    problem = report.problem
    return {
        "plan": report.chosen,
        "plans": {
            name: _plan_body(plan, report.plan)
            for name, plan in report.plans.items()
        },
        "resources": [asdict(resource) for resource in problem.resources],
        "cuts": [_cut_body(report, facts) for facts in (None, *report.cuts)],
        "samples": problem.num_samples,
        "epochs": problem.epochs
        + problem.cached_samples / max(1, problem.num_samples),
        "computed_epochs": problem.epochs,
        "push_one_off_seconds": problem.push_one_off_seconds,
        "server_limit_bytes": problem.server_limit_bytes,
        "client_limit_bytes": problem.client_limit_bytes,
    }


def _plan_body(plan: Plan, chosen: Plan) -> dict[str, Any]:
    times = None
    if chosen.total_seconds:
        times = _finite(plan.total_seconds / chosen.total_seconds)
    return {
        "mix": [
            {"cut": o.cut, "encoding": o.encoding, "share": share}
            for o, share in plan.mix
        ],
        "samples_per_second": plan.samples_per_second,
        "one_off_seconds": plan.one_off_seconds,
        "total_seconds": _finite(plan.total_seconds),
        "times_plan": times,
        "binding": list(plan.binding),
        "utilisation": dict(plan.utilisation),
        "pays_from_samples": plan.pays_from_samples,
        "reasons": list(plan.reasons),
    }


def _cut_body(report: Report, facts: CutFacts | None) -> dict[str, Any]:
    cut = facts.index if facts else 0
    options = report.options(cut)
    return {
        "cut": cut,
        "name": facts.name if facts else "sample",
        "op": facts.op if facts else None,
        "shape": list(facts.shape) if facts else None,
        "float32_bytes": facts.float32_bytes if facts else None,
        "candidate": bool(options),
        "share": report.share(cut),
        "options": [_option_body(report.problem, o) for o in options],
    }


def _option_body(problem: Problem, option: Option) -> dict[str, Any]:
    return {
        "encoding": option.encoding,
        "bytes": option.use.get("link", 0.0),
        "seconds": {
            r.name: _finite(problem.seconds(option, r.name))
            for r in problem.resources
        },
        "samples_per_second": problem.samples_per_second(option),
        "server_bytes": option.server_bytes,
        "client_bytes": option.client_bytes,
        "fits": problem.fits(option),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _share_text(share: float) -> str:
    return percent_text(share) if share else ""


def op_text(op: str) -> str:
    """Shortens ``aten.conv2d.default`` to ``conv2d``."""
    parts = op.split(".")
    name = parts[1] if len(parts) > 1 else op
    for addition in ("_native_", "_legit", "_no_training"):
        name = name.replace(addition, "")
    return name.strip("_")


def shortened(text: str, width: int) -> str:
    """Removes the beginning of a text that is longer than ``width``."""
    return text if len(text) <= width else f"…{text[len(text) - width + 1 :]}"


def _sizes(cut: Mapping[str, Any]) -> dict[str, float]:
    """Returns sizes in the best compression of each number format.

    Args:
        cut: the JSON form of the cut.
    """
    if not cut["cut"]:
        return {}
    sizes: dict[str, float] = {}
    for option in cut["options"]:
        dtype = Encoding.parse(option["encoding"]).dtype
        sizes[dtype] = min(option["bytes"], sizes.get(dtype, math.inf))
    return sizes or {"float32": cut["float32_bytes"]}


def _memory(num_bytes: float, limit_bytes: float) -> str:
    excess = " !" if num_bytes > limit_bytes else ""
    return f"{bytes_text(num_bytes) if num_bytes else '-'}{excess}"
