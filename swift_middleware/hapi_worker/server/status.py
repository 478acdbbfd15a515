"""What a worker is doing just now, for people: ``GET /status``."""

from __future__ import annotations

import os
import time
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hapi_worker.execution.device_executor import Executor
from hapi_worker.jobs.worker import Worker


def status_of(worker: Worker, *, with_names: bool) -> dict[str, Any]:
    """JSON-able facts; keys as ``docs/operating.rst`` lists them.

    Args:
        worker: that is asked.
        with_names: whether the asker may know which accounts there are.
    """
    admission = worker.admission
    places = admission.places
    return {
        "version": package_version(),
        "pid": os.getpid(),
        "status": "draining" if admission.draining else "ok",
        "uptime_seconds": round(time.monotonic() - worker.started, 3),
        "cores": worker.cores,
        "jobs_running": admission.num_running(),
        "jobs_waiting": admission.num_waiting(),
        "max_streams": places.streams,
        "max_streams_per_account": places.per_account,
        "totals": _totals(worker),
        "devices": [_device(each) for each in worker.executors],
        "queues": {name: len(pool) for name, pool in worker.pools.items()},
        "accounts": _accounts(worker, with_names),
    }


def _totals(worker: Worker) -> dict[str, float]:
    """Counters, from which two answers make rates."""
    value = worker.metrics.value
    return {
        "samples": value("hapi_worker_samples_total"),
        "errors": value("hapi_worker_sample_errors_total"),
        "passes": value("hapi_worker_batch_samples_count"),
        "received_bytes": value("hapi_worker_received_bytes_total"),
        "sent_bytes": value("hapi_worker_sent_bytes_total"),
        "out_of_memory": value("hapi_worker_out_of_memory_total"),
        "slow_passes": worker.overruns.total,
    }


def _device(executor: Executor) -> dict[str, Any]:
    residency = executor.residency
    _, resident_bytes = residency.resident()
    return {
        "name": executor.name,
        "in_service": executor.in_service,
        "forwards": executor.pool.num_threads,
        "memory_limit_bytes": residency.limit_bytes,
        "resident_bytes": resident_bytes,
        "reserved_bytes": residency.reserved_bytes(),
        "longest_pass_seconds": round(residency.longest_pass_seconds(), 3),
        "models": [
            {"digest": digest, "parameter_bytes": size, "jobs": jobs}
            for digest, size, jobs in residency.models()
        ],
    }


def _accounts(worker: Worker, with_names: bool) -> list[dict[str, Any]]:
    """Those with jobs, the busiest first."""
    admission = worker.admission
    jobs = admission.jobs()
    places = Counter(job.account for job in jobs)
    waiting = admission.waiting_by_account()
    found = []
    busiest = sorted(
        {*places, *waiting},
        key=lambda account: (-places[account], -waiting[account], account),
    )
    for account in busiest:
        load = worker.load_meter.report(account, places[account])
        found.append(
            {
                "account": account if with_names else None,
                "weight": worker.ledger.weight(account),
                "share": round(load.share, 4),
                "streams": places[account],
                "waiting": waiting[account],
                "buffered_bytes": sum(
                    job.buffered() for job in jobs if job.account == account
                ),
            }
        )
    return found


def package_version() -> str:
    """Of ``swift-hapi``; ``unknown`` in a source tree."""
    try:
        return version("swift-hapi")
    except PackageNotFoundError:
        return "unknown"
