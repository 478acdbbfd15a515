"""What the worker counts, for Prometheus.

========================================= ======================= =========
name                                      labels                  unit
========================================= ======================= =========
hapi_worker_jobs_total                    kind, outcome, reason   jobs
hapi_worker_refusals_total                reason                  requests
hapi_worker_uploads_total                 outcome, reason         uploads
hapi_worker_profiles_total                outcome, reason         profiles
hapi_worker_samples_total                                         samples
hapi_worker_sample_errors_total                                   samples
hapi_worker_batch_samples                 (histogram)             samples
hapi_worker_stage_seconds_total           stage                   seconds
hapi_worker_received_bytes_total                                  bytes
hapi_worker_sent_bytes_total                                      bytes
hapi_worker_saturated_total                                       values
hapi_worker_resident_models                                       models
hapi_worker_resident_bytes                                        bytes
hapi_worker_jobs_running                                          jobs
hapi_worker_queue_length                  pool                    pieces
========================================= ======================= =========

``outcome`` is ``done``, ``failed`` or ``gone`` (the other end went away);
``reason`` is an error code of :data:`hapi_protocol.errors.CODES` or empty.
Of profiles, ``done`` and ``failed`` are runs, and the others are requests:
``kept`` had an earlier run's result, ``joined`` waited for one under way,
``refused`` had neither.  Batches and their mean size are the histogram's count
and sum.  A request for a job that was refused counts in ``refusals``, not in
``jobs``, and so does whatever else is no job, upload or profile yet: a user
who may not connect, a path that is not there, a message that cannot be read.
A reader that took nothing for ``stall_seconds`` is a job that ``failed``, with
the reason ``too_slow``.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The counters of one worker, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.jobs = self._counter(
            "jobs", "Jobs that ended", "kind", "outcome", "reason"
        )
        self.refusals = self._counter(
            "refusals", "Requests that were refused", "reason"
        )
        self.uploads = self._counter(
            "uploads", "Packages received", "outcome", "reason"
        )
        self.profiles = self._counter(
            "profiles",
            "Runs that profile a model, and requests for them",
            "outcome",
            "reason",
        )
        self.samples = self._counter("samples", "Rows sent")
        self.sample_errors = self._counter(
            "sample_errors", "Rows sent with an error"
        )
        self.batch_samples = Histogram(
            "hapi_worker_batch_samples",
            "Samples of a micro-batch",
            buckets=_BATCH_BUCKETS,
            registry=self._registry,
        )
        self.stage_seconds = self._counter(
            "stage_seconds", "Seconds spent per stage", "stage"
        )
        self.received_bytes = self._counter(
            "received_bytes", "Source bytes read"
        )
        self.sent_bytes = self._counter("sent_bytes", "Stream bytes sent")
        self.saturated = self._counter(
            "saturated", "Values clipped by an encoding"
        )

    def watch(
        self,
        *,
        resident: Callable[[], tuple[int, int]],
        jobs_running: Callable[[], int],
        queues: dict[str, Callable[[], int]],
    ) -> None:
        """Adds gauges that are read when somebody asks."""
        self._gauge("resident_models", "Models in memory").set_function(
            lambda: resident()[0]
        )
        self._gauge("resident_bytes", "Their parameters").set_function(
            lambda: resident()[1]
        )
        self._gauge("jobs_running", "Jobs running").set_function(jobs_running)
        lengths = self._gauge("queue_length", "Waiting work", "pool")
        for pool, length in queues.items():
            lengths.labels(pool).set_function(length)

    def render(self) -> bytes:
        """The text of ``GET /metrics``."""
        return generate_latest(self._registry)

    def value(self, name: str, **labels: str) -> float:
        """One sample's value, 0 when it was never set."""
        return self._registry.get_sample_value(name, labels) or 0.0

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(
            f"hapi_worker_{name}", text, labels, registry=self._registry
        )

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(
            f"hapi_worker_{name}", text, labels, registry=self._registry
        )
