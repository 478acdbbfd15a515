"""Metrics of the filter, sent by the statsd settings of Swift's proxy.

============================== ======= =======================================
metric                         kind    meaning
============================== ======= =======================================
``hapi.requests``              counter requests that the filter answered
``hapi.errors.<code>``         counter of these, answered with a HAPI error
``hapi.swift_answers``         counter of these, answered as Swift answers the
                                       plain request (401, 403, 404, ...)
``hapi.headers_only``          counter of these, HEAD and 304
``hapi.profiles``              counter of these, answered with a profile
``hapi.cached_answers``        counter of these, answered from the cache
``hapi.cache_requests``        counter of these, that list or empty a cache
``hapi.streams.done``          counter of these, features read to their end
``hapi.streams.broken``        counter of these, broken off after their start
``hapi.streams.gone``          counter of these, closed early by the client
``hapi.multi_requests``        counter requests for many objects, with any end
``hapi.source_bytes``          counter bytes of objects sent to the worker
``hapi.sent_bytes``            counter bytes of features sent to clients
``hapi.places.proxy``          counter jobs that this host's worker began
``hapi.places.object``         counter jobs that an object server began
``hapi.node.<kind>``           counter faults of object servers, by kind
``hapi.node.<kind>.<node>``    counter of these, on ``<node>``: its address in
                                       the ring, as ``10-0-0-1_6200``
``hapi.model_uploads``         counter packages sent to the worker
``hapi.model_upload.timing``   timing  upload of a package that it accepted
``hapi.grant.timing``          timing  until a job was granted, with the wait
                                       for a slot and for others' uploads
``hapi.first_byte.timing``     timing  from the request to its first features
``hapi.stream.timing``         timing  from the first features to the end
``hapi.cache.hits``            counter cache lookups that found features
``hapi.cache.misses``          counter cache lookups that found none
``hapi.cache.read_failures``   counter cache lookups that failed, or exceeded
                                       ``cache_timeout``
``hapi.cache.damaged``         counter damaged entries, which are deleted
``hapi.cache.stores``          counter entries stored
``hapi.cache.store_failures``  counter entries that Swift refused; its answer
                                       is in the log
``hapi.cache.full``            counter not cached: ``cache_max_account_bytes``
``hapi.cache.too_large``       counter not cached: ``cache_max_entry_bytes``
``hapi.cache.no_buffer``       counter not cached, or not read:
                                       ``cache_buffer_bytes``
``hapi.cache.with_errors``     counter not cached: rows with errors
============================== ======= =======================================

============  ==========================================================
``<kind>``    the object server
============  ==========================================================
``silent``    was silent for ``object_silence_seconds``, or its worker did
              not answer it for two seconds
``lost``      could not be reached, or broke off
``worker``    has no worker that answers
``busy``      has a worker without a place for the job
``degraded``  has a worker that does not take the package
``device``    has a device that is not mounted
``damaged``   has a damaged replica
``stale``     does not have the object, or has another version of it
``absent``    does not have the filter
``refused``   refused the request, because of its signature or release
============  ==========================================================

The filter of object servers counts ``hapi_object.jobs``,
``hapi_object.models`` (packages received), ``hapi_object.worker_away``,
``worker_busy`` and ``worker_degraded`` (errors of a worker that does not
answer, has no place, or takes no packages), ``hapi_object.not_here`` (objects
that are not there as named), ``hapi_object.refused`` (requests without a good
signature), and streams, bytes and timings by the names above.

Each request counts once among the nine kinds that follow ``hapi.requests``,
when it ends.  ``<code>`` is one of :data:`hapi_protocol.errors.CODES`.  Bytes
are counted when a stream ends.  Timings are milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hapi_protocol.errors import HapiError
from hapi_protocol.printable import printable

OUTCOME_DONE = "done"
OUTCOME_BROKEN = "broken"
OUTCOME_GONE = "gone"


def metric_name(ip: str, port: int) -> str:
    """An object server as one word of a metric's name."""
    return f"{ip}_{port}".translate(str.maketrans(".:", "--"))


@dataclass(eq=False)
class FilterMetrics:
    """The counters and timings of the table above.

    Args:
        logger: Swift's, with statsd.
        prefix: first word of the names.
    """

    logger: Any
    prefix: str = "hapi"

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to ``hapi.<name>``."""
        self.logger.update_stats(f"{self.prefix}.{name}", amount)

    def timing(self, name: str, seconds: float) -> None:
        """Records one value of ``hapi.<name>.timing``."""
        self.logger.timing(f"{self.prefix}.{name}.timing", 1000 * seconds)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Records the duration of the block, unless it raises."""
        started = time.monotonic()
        yield
        self.timing(name, time.monotonic() - started)


class StreamReporter:
    """Reports the start and the end of one stream to metrics and log.

    Args:
        name: name of the source.
        logger: Swift's, with statsd.
        prefix: first word of the metrics' names.
    """

    def __init__(self, name: str, logger: Any, prefix: str = "hapi") -> None:
        self._name = name
        self._logger = logger
        self._metrics = FilterMetrics(logger, prefix)
        self._thread_locals = logger.thread_locals
        self._requested = self._started = time.monotonic()

    def adopt_thread(self) -> None:
        """Makes Swift's log lines of the calling thread name this request."""
        self._logger.thread_locals = self._thread_locals

    def started(self) -> None:
        """Reports that the first features have arrived."""
        self._started = time.monotonic()
        self._metrics.timing("first_byte", self._started - self._requested)

    def ended(
        self,
        outcome: str,
        error: HapiError | None,
        source_bytes: int,
        sent_bytes: int,
    ) -> None:
        """Reports the end of a started stream, once.

        Args:
            outcome: ``done``, ``broken``, or ``gone`` (closed by its reader).
            error: the reason of ``broken``.
            source_bytes: bytes sent to the worker.
            sent_bytes: bytes of features that the reader took.
        """
        metrics = self._metrics
        metrics.count(f"streams.{outcome}")
        metrics.count("source_bytes", source_bytes)
        metrics.count("sent_bytes", sent_bytes)
        metrics.timing("stream", time.monotonic() - self._started)
        if error:
            self._logger.warning(
                "hapi: the answer on %s breaks off: %s",
                printable(self._name),
                printable(str(error)),
            )
