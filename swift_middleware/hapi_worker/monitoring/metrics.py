"""Metrics of the worker for Prometheus.

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
hapi_worker_stage_seconds                 stage (histogram)       seconds
hapi_worker_slot_seconds                  (histogram)             seconds
hapi_worker_received_bytes_total                                  bytes
hapi_worker_sent_bytes_total                                      bytes
hapi_worker_saturated_total                                       values
hapi_worker_resident_models                                       models
hapi_worker_resident_bytes                                        bytes
hapi_worker_waiting_models                                        models
hapi_worker_degraded                                              0 or 1
hapi_worker_jobs_running                                          jobs
hapi_worker_jobs_waiting                                          requests
hapi_worker_buffered_bytes                                        bytes
hapi_worker_reserved_bytes                device                  bytes
hapi_worker_allocated_bytes               device                  bytes
hapi_worker_longest_pass_seconds          device                  seconds
hapi_worker_slow_passes                                           passes
hapi_worker_out_of_memory_total                                   passes
hapi_worker_device_failures_total         device                  devices
hapi_worker_queue_length                  pool                    pieces
========================================= ======================= =========

``outcome`` is ``done``, ``failed`` or ``gone`` (the client disconnected);
``reason`` is an error code of :data:`hapi_protocol.errors.CODES` or empty.
For profiles, ``done`` and ``failed`` count runs, and the others count
requests: ``kept`` got an earlier run's result, ``joined`` waited for a current
run, ``refused`` got neither.  The histogram's count and sum give the number
and mean size of batches.  A refused request for a job counts in ``refusals``,
not in ``jobs``.  So does a request that never became a job, upload or profile:
a user who may not connect, an unknown path, an unreadable message.  If a
client took nothing for ``stall_seconds``, its job ``failed`` with the reason
``too_slow``.  ``reserved_bytes`` is the predicted memory of the running
passes; ``allocated_bytes`` is the memory in use, by torch on a GPU, else by
the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
"""Half decades, from a decoded image to the longest allowed pass."""
_GAUGES: Mapping[str, str] = MappingProxyType(
    {
        "resident_models": "Models in memory",
        "resident_bytes": "Parameters of the models in memory",
        "waiting_models": "Models that wait for memory",
        "degraded": "The worker cannot take packages; its log says why",
        "jobs_running": "Jobs running",
        "jobs_waiting": "Requests that wait for admission",
        "buffered_bytes": "Samples and features that jobs hold",
        "reserved_bytes": "Predicted working memory of the running passes",
        "allocated_bytes": "Memory in use on the device",
        "longest_pass_seconds": "Duration of the longest running pass",
        "queue_length": "Work that waits for a thread",
        "slow_passes": "Passes that took longer than pass_seconds",
    }
)


class Metrics:
    """Counters and gauges of one worker, in their own registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
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
        self.stage_seconds = Histogram(
            "hapi_worker_stage_seconds",
            "Seconds of a stage for a job's part of a micro-batch",
            ["stage"],
            buckets=_SECONDS_BUCKETS,
            registry=self._registry,
        )
        self.slot_seconds = Histogram(
            "hapi_worker_slot_seconds",
            "Seconds that a request waited for admission",
            buckets=_SECONDS_BUCKETS,
            registry=self._registry,
        )
        self.received_bytes = self._counter(
            "received_bytes", "Source bytes read"
        )
        self.sent_bytes = self._counter("sent_bytes", "Stream bytes sent")
        self.out_of_memory = self._counter(
            "out_of_memory", "Passes that ran out of memory"
        )
        self.device_failures = self._counter(
            "device_failures", "Devices taken out of service", "device"
        )
        self.saturated = self._counter(
            "saturated", "Values clipped by an encoding"
        )

    def add_gauge(
        self, name: str, read: Callable[[], float], **labels: str
    ) -> None:
        """Adds a gauge that is read for each response.

        Args:
            name: name without ``hapi_worker_``; each set of labels is added
                by its own call.
            read: returns the value.
            labels: names and values of labels.
        """
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._gauges[name] = Gauge(
                f"hapi_worker_{name}",
                _GAUGES[name],
                sorted(labels),
                registry=self._registry,
            )
        (gauge.labels(**labels) if labels else gauge).set_function(read)

    def render(self) -> bytes:
        """Returns the text of ``GET /metrics``."""
        return generate_latest(self._registry)

    def value(self, name: str, **labels: str) -> float:
        """Returns one sample's value, 0 if it was never set."""
        return self._registry.get_sample_value(name, labels) or 0.0

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(
            f"hapi_worker_{name}", text, labels, registry=self._registry
        )
