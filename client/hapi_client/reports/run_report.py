"""The reports of a run, read from and converted to JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from hapi_client.reports.epoch_report import (
    EpochReport,
    report_body,
    report_from_body,
)
from hapi_client.reports.html import check_plots
from hapi_protocol.errors import ClientError

SUFFIXES = (".json", ".html")
VERSION = 1
DEFAULT_TITLE = "A training run"

Curves: TypeAlias = Mapping[str, Sequence[Mapping[str, float | None]]]
"""Results of each epoch of each run, by its name: ``loss``, ``accuracy``,
``val_loss``, ``val_accuracy``, ``val_top5`` and others."""


@dataclass(frozen=True)
class RunReport:
    """The epochs of one run.

    Attributes:
        title: title of the run.
        reports: in order of their beginning.
        curves: results of the training, if known.
    """

    title: str
    reports: tuple[EpochReport, ...]
    curves: Curves = field(default_factory=dict)


def check_report_path(path: str | os.PathLike[str]) -> None:
    """Checks the suffix before any work is done.

    Raises:
        ClientError: ``bad_configuration`` for another than ``SUFFIXES``, or
            if figures cannot be drawn.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".html":
        check_plots()
    if suffix not in SUFFIXES:
        raise ClientError(
            "bad_configuration",
            f"report is {os.fspath(path)!r}; the name must end in "
            f"{' or '.join(SUFFIXES)}",
        )


def run_body(run: RunReport) -> dict[str, Any]:
    """Returns the JSON form: version, title, reports and curves."""
    return {
        "version": VERSION,
        "title": run.title,
        "reports": [report_body(report) for report in run.reports],
        "curves": run.curves,
    }


def read_reports(path: str | os.PathLike[str]) -> RunReport:
    """Reads a file written by ``hapi train --report`` or ``--json``.

    Raises:
        ClientError: ``bad_configuration`` naming the file, what is wrong
            with it, and the remedy.
    """
    try:
        body = json.loads(Path(path).read_text(encoding="utf-8"))
        return _run_from_body(body)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _unusable(path, str(error)) from error


def _run_from_body(body: Any) -> RunReport:
    if not isinstance(body, Mapping) or "reports" not in body:
        raise ValueError("key 'reports' is missing")
    version = body.get("version", VERSION)
    if version != VERSION:
        raise ValueError(
            f"its version is {version!r}; this release reads {VERSION}"
        )
    bodies = body["reports"]
    if not isinstance(bodies, list):
        raise ValueError("'reports' is not a list")
    reports = []
    for number, report in enumerate(bodies):
        try:
            reports.append(report_from_body(report))
        except ValueError as error:
            raise ValueError(f"report {number}: {error}") from error
    return RunReport(
        str(body.get("title", DEFAULT_TITLE)), tuple(reports), _curves(body)
    )


def _curves(body: Mapping[str, Any]) -> Curves:
    curves = body.get("curves", {})
    try:
        return {
            str(name): [
                {str(key): value for key, value in epoch.items()}
                for epoch in epochs
            ]
            for name, epochs in curves.items()
        }
    except (AttributeError, TypeError) as error:
        raise ValueError(f"'curves' is {curves!r:.80}") from error


def _unusable(path: str | os.PathLike[str], reason: str) -> ClientError:
    return ClientError(
        "bad_configuration",
        f"{os.fspath(path)} cannot be read as a report: {reason}; give a "
        "file written by 'hapi train --report PATH.json' or '--json PATH'",
    )
