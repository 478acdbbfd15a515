"""Results of ``hapi train``: as text, tables and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hapi_client.cli.context import Columns, print_facts, print_table
from hapi_client.job.transfer_job import TransferJob
from hapi_client.metrics.events import JobStats
from hapi_client.reports.epoch_report import report_body
from hapi_client.reports.run_tables import essentials
from hapi_splitter.planner.problem import mix_label
from hapi_training.loop import EpochResult, History
from hapi_training.recipe import Recipe


@dataclass(frozen=True)
class Run:
    """One combination of a sweep, or the only run.

    Attributes:
        name: what a sweep varies, such as ``lr=0.1``; empty without one.
        recipe: its optimizer, learning rate and loss.
        history: losses and accuracies.
    """

    name: str
    recipe: Recipe
    history: History

    @property
    def best(self) -> EpochResult:
        """The epoch with the highest accuracy."""
        return self.history.epochs[self.history.best_epoch]


@dataclass(frozen=True)
class TrainResult:
    """Finished training runs.

    Attributes:
        model: name of the model.
        freeze: last frozen module.
        classes: number of classes.
        job: the closed job, for its plans and reports.
        stats: counters of the job; those of a closed job include later
            traffic of its connection.
        runs: each combination of a sweep.
    """

    model: str
    freeze: Any
    classes: int
    job: TransferJob
    stats: JobStats
    runs: Sequence[Run]

    @property
    def best(self) -> Run:
        """The first run with the highest accuracy in an epoch."""
        return max(self.runs, key=lambda run: run.best.score)

    @property
    def history(self) -> History:
        """Losses and accuracies of the best run."""
        return self.best.history


def describe_epoch(result: EpochResult) -> str:
    validated = ""
    if result.val_loss is not None:
        validated = (
            f"; validation loss {result.val_loss:.4f}, top-1 "
            f"{result.val_accuracy:.3f}, top-5 {result.val_top5:.3f}"
        )
    return (
        f"loss {result.mean_loss:.4f}, accuracy {result.accuracy:.3f}, "
        f"{result.num_samples / result.seconds:.0f} samples/s{validated}"
    )


def epochs_facts(epochs: Sequence[EpochResult]) -> list[dict[str, Any]]:
    """Returns the JSON form of the results of epochs."""
    return [
        {
            "loss": epoch.mean_loss,
            "accuracy": epoch.accuracy,
            "val_loss": epoch.val_loss,
            "val_accuracy": epoch.val_accuracy,
            "val_top5": epoch.val_top5,
            "seconds": epoch.seconds,
            "samples": epoch.num_samples,
        }
        for epoch in epochs
    ]


def history_facts(history: History) -> dict[str, Any]:
    """Returns the JSON form of the results of a run."""
    return {
        "epochs": epochs_facts(history.epochs),
        "losses": history.losses,
        "best_epoch": history.best_epoch,
        "checkpoints": asdict(history.checkpoints)
        if history.checkpoints
        else None,
    }


def curves_of(
    results: Mapping[str, Sequence[EpochResult]],
) -> dict[str, list[dict[str, Any]]]:
    """Returns the results of the epochs of each run, for its report."""
    return {name: epochs_facts(epochs) for name, epochs in results.items()}


def result_facts(result: TrainResult) -> dict[str, Any]:
    """Returns the JSON form of a run, or a sweep."""
    job = result.job
    return {
        "model": result.model,
        "freeze": result.freeze,
        "classes": result.classes,
        "cut": job.cut,
        **history_facts(result.history),
        "runs": [
            {
                "name": run.name,
                "recipe": {**asdict(run.recipe), "autocast": None}
                | ({"autocast": "bf16"} if run.recipe.autocast else {}),
                **history_facts(run.history),
            }
            for run in result.runs
        ],
        "stats": asdict(result.stats),
        "plan": job.plan.label if job.plan else None,
        "no_plan_reason": job.no_plan_reason,
        "plan_changes": [
            {
                "seconds": change.seconds,
                "mix": [
                    {"cut": cut, "encoding": encoding, "share": share}
                    for (cut, encoding), share in change.mix.items()
                ],
                "samples_per_second": change.samples_per_second,
                "why": change.why,
            }
            for change in job.plan_changes
        ],
        "reports": [report_body(report) for report in job.reports],
    }


def _result_cells(epoch: EpochResult) -> tuple[str, ...]:
    validated: tuple[str, ...] = ()
    if epoch.val_loss is not None:
        validated = (
            f"{epoch.val_loss:.4f}",
            f"{epoch.val_accuracy:.3f}",
            f"{epoch.val_top5:.3f}",
        )
    return (f"{epoch.mean_loss:.4f}", f"{epoch.accuracy:.3f}", *validated)


def _print_results(result: TrainResult) -> None:
    """Prints the epochs of the only run, or the best epoch of each run."""
    first = result.history.epochs[0]
    columns = ["loss", "accuracy"]
    if first.val_loss is not None:
        columns += ["val loss", "val top-1", "val top-5"]
    if len(result.runs) == 1:
        print_table(
            ("epoch", *columns, "seconds", "samples"),
            [
                (
                    str(number),
                    *_result_cells(epoch),
                    f"{epoch.seconds:.1f}",
                    str(epoch.num_samples),
                )
                for number, epoch in enumerate(result.history.epochs)
            ],
        )
        return
    print_table(
        ("run", "best epoch", *columns, "seconds", ""),
        [
            (
                run.name,
                str(run.history.best_epoch),
                *_result_cells(run.best),
                f"{run.history.seconds:.1f}",
                "best" if run is result.best else "",
            )
            for run in result.runs
        ],
    )


def print_result(result: TrainResult) -> None:
    """Prints losses, throughput, plans and counters of the runs."""
    job = result.job
    _print_results(result)
    if len(result.runs) == 1:
        summary = essentials(job.reports)
        if summary.rows:  # none, if all epochs were trained already
            print_table(summary.header, summary.rows)
    changes = [
        (f"{change.seconds:.0f}", mix_label(change.mix), change.why)
        for change in job.plan_changes
    ]
    if changes:
        print_table(("seconds", "plan", "why"), changes)
    columns: Columns = {
        "cut": "cut",
        "over the wire": "bytes",
        "package": "package_bytes",
        "retries": "retries",
        "fallbacks": "fallbacks",
        "skipped": "skipped",
        "cached in Swift": lambda facts: f"{facts['cached']:,}",
        "cached here": lambda facts: f"{facts['local_hits']:,}",
    }
    print_facts([{"cut": job.cut, **asdict(result.stats)}], columns)
