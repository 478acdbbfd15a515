"""Section ``accuracy``: what rounding features costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.suite.report.document import Part, Picture, Table, Text
from benchmarks.suite.report.figures import NONE, percent
from benchmarks.suite.report.looks import dress, new_figure

Section = Mapping[str, Any]

_TEXT = """\
A network is trained on five classes of CIFAR-10 ({pretrain} epochs), frozen,
and its tail trained on the other five: {train} images, {test} to judge by,
{seeds} seeds ({seeded} differ). ``torch`` is the same with nothing of HAPI.
Mean, least and most of the seeds; differences are to float32 of the same
seed, in percentage points. Accuracy on the first five classes, seed by seed:
{first}."""
_ROW_INCHES = 0.3
_INK = "#0072b2"


def accuracy_part(section: Section) -> Part:
    """Picture and table."""
    text = _TEXT.format(
        pretrain=section["pretrain_epochs"],
        train=section["train"],
        test=section["test"],
        seeds=section["seeds"],
        seeded=section["seeded"],
        first=", ".join(map(percent, section["pretrained"])),
    )
    rows = [
        (f"{kind}: {way}", each)
        for kind, freeze in section["freezes"].items()
        for way, each in freeze["ways"].items()
    ]
    return Part(
        "Accuracy with rounded features",
        [Text(" ".join(text.split())), _picture(rows), _table(section)],
    )


def _table(found: Section) -> Table:
    return Table(
        (
            "Frozen up to",
            "Features",
            "Accuracy",
            "Range",
            "Beside float32, points",
            "Range",
            "Clipped values",
        ),
        [
            _row(f"``{freeze['module']}`` ({kind})", way, each)
            for kind, freeze in found["freezes"].items()
            for way, each in freeze["ways"].items()
        ],
        words=2,
    )


def _row(frozen: str, way: str, found: Section) -> Sequence[str]:
    beside = found["difference"]
    return (
        frozen,
        f"``{way}``",
        percent(found["mean"], 2),
        f"{percent(found['low'], 2)} … {percent(found['high'], 2)}",
        f"{100 * beside['mean']:+.2f}",
        f"{100 * beside['low']:+.2f} … {100 * beside['high']:+.2f}",
        str(found.get("saturated", NONE)),
    )


def _picture(rows: Sequence[tuple[str, Section]]) -> Picture:
    figure, (axes,) = new_figure(1.1 + _ROW_INCHES * len(rows))
    places = range(len(rows))
    beside = [each["difference"] for _, each in rows]
    axes.hlines(
        places,
        [100 * each["low"] for each in beside],
        [100 * each["high"] for each in beside],
        color=_INK,
        linewidth=2,
    )
    axes.plot([100 * each["mean"] for each in beside], places, "o", color=_INK)
    axes.axvline(0, color="#57606a", linewidth=1)
    axes.set_yticks(places, [words for words, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    dress(
        axes,
        "Accuracy beside that with float32 features",
        "percentage points; mean, least and most of the seeds",
        "",
    )
    return Picture(
        "accuracy",
        figure,
        "Difference of accuracy to float32 features, by freeze point and"
        " number format",
    )
