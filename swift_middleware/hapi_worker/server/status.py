"""The worker's current state for operators: ``GET /status``."""

from __future__ import annotations

import os
import time
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hapi_worker.execution.device_executor import Executor
    from hapi_worker.jobs.worker import Worker


def health_of(worker: Worker) -> dict[str, Any]:
    """Builds the response of ``GET /healthz``."""
    num_models, resident_bytes = worker.models.loaded_totals()
    return {
        **_summary(worker),
        "devices": {e.name: e.in_service for e in worker.executors},
        "numerics_tag": worker.numerics_tag,
        "resident_models": num_models,
        "resident_bytes": resident_bytes,
        "memory_limit_bytes": worker.models.limit_bytes,
    }


def status_of(worker: Worker, *, with_names: bool) -> dict[str, Any]:
    """Builds the response of ``GET /status``.

    Args:
        worker: the worker.
        with_names: include the accounts' names.
    """
    per_account = worker.admission.queue.limits.per_account
    return {
        **_summary(worker),
        "uptime_seconds": round(time.monotonic() - worker.started, 3),
        "cores": worker.cores,
        "max_streams_per_account": per_account,
        "totals": _totals(worker),
        "devices": [_device(executor) for executor in worker.executors],
        "queues": {name: len(pool) for name, pool in worker.pools.items()},
        "accounts": _accounts(worker, with_names),
    }


def _summary(worker: Worker) -> dict[str, Any]:
    admission = worker.admission
    return {
        "version": package_version(),
        "pid": os.getpid(),
        "status": worker.state,
        "problem": worker.self_test.problem,
        "jobs_running": admission.num_running(),
        "jobs_waiting": admission.queue.num_waiting(),
        "max_streams": admission.queue.limits.slots,
    }


def _totals(worker: Worker) -> dict[str, float]:
    """Counters; two responses give rates."""
    value = worker.metrics.value
    return {
        "samples": value("hapi_worker_samples_total"),
        "errors": value("hapi_worker_sample_errors_total"),
        "passes": value("hapi_worker_batch_samples_count"),
        "received_bytes": value("hapi_worker_received_bytes_total"),
        "sent_bytes": value("hapi_worker_sent_bytes_total"),
        "out_of_memory": value("hapi_worker_out_of_memory_total"),
        "slow_passes": worker.quarantine.total,
    }


def _device(executor: Executor) -> dict[str, Any]:
    device_models = executor.device_models
    _, resident_bytes = device_models.loaded_totals()
    return {
        "name": executor.name,
        "in_service": executor.in_service,
        "forwards": executor.pool.num_threads,
        "memory_limit_bytes": device_models.limit_bytes,
        "resident_bytes": resident_bytes,
        "reserved_bytes": device_models.working_memory.reserved_bytes(),
        "longest_pass_seconds": round(
            device_models.working_memory.longest_pass_seconds(), 3
        ),
        "models": [
            {"digest": digest, "parameter_bytes": size, "jobs": jobs}
            for digest, size, jobs in device_models.models()
        ],
    }


def _accounts(worker: Worker, with_names: bool) -> list[dict[str, Any]]:
    """Accounts with jobs, the busiest first."""
    admission = worker.admission
    jobs = admission.jobs()
    running = Counter(job.account for job in jobs)
    waiting = admission.queue.waiting_by_account()
    busiest = sorted(
        {*running, *waiting},
        key=lambda account: (-running[account], -waiting[account], account),
    )
    return [
        {
            "account": account if with_names else None,
            "weight": worker.ledger.weight(account),
            "share": round(
                worker.load_meter.report(account, running[account]).share, 4
            ),
            "streams": running[account],
            "waiting": waiting[account],
            "buffered_bytes": sum(
                job.buffered() for job in jobs if job.account == account
            ),
        }
        for account in busiest
    ]


def package_version() -> str:
    """Returns the version of ``swift-hapi``; ``unknown`` in a source tree."""
    try:
        return version("swift-hapi")
    except PackageNotFoundError:
        return "unknown"
