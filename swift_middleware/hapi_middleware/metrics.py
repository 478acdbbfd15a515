"""What the filter counts, by the statsd settings of Swift's proxy.

============================== ======= =======================================
metric                         kind    meaning
============================== ======= =======================================
``hapi.requests``              counter requests that were obeyed
``hapi.errors.<code>``         counter of these, answered with an error of ours
``hapi.swift_answers``         counter of these, answered as Swift answers the
                                       plain request (401, 403, 404, ...)
``hapi.headers_only``          counter of these, HEAD and 304
``hapi.profiles``              counter of these, answered with a profile
``hapi.kept_answers``          counter of these, answered with kept features
``hapi.cache_requests``        counter of these, that list or empty a cache
``hapi.streams.done``          counter of these, features read to their end
``hapi.streams.broken``        counter of these, broke off after they had begun
``hapi.streams.gone``          counter of these, given up by their client
``hapi.multi_requests``        counter requests for many objects, however they
                                       ended
``hapi.source_bytes``          counter bytes of objects sent to the worker
``hapi.sent_bytes``            counter bytes of features handed on
``hapi.model_uploads``         counter packages sent to the worker
``hapi.model_upload.timing``   timing  of those that it took over
``hapi.grant.timing``          timing  until a job was granted, waiting for a
                                       place or for others' uploads included
``hapi.first_byte.timing``     timing  from the request to its first features
``hapi.stream.timing``         timing  from the first features to the end
``hapi.cache.hits``            counter kept features that were found
``hapi.cache.misses``          counter looks that found none
``hapi.cache.read_failures``   counter looks that failed, or took longer than
                                       ``cache_timeout``
``hapi.cache.damaged``         counter entries that were not as stored; deleted
``hapi.cache.stores``          counter entries that were stored
``hapi.cache.store_failures``  counter entries that Swift did not take; its
                                       answer is in the log
``hapi.cache.full``            counter not kept: ``cache_max_account_bytes``
``hapi.cache.too_large``       counter not kept: ``cache_max_entry_bytes``
``hapi.cache.no_buffer``       counter not kept, or not read:
                                       ``cache_buffer_bytes``
``hapi.cache.with_errors``     counter not kept: rows with errors
============================== ======= =======================================

Each request counts once among the nine kinds that follow ``hapi.requests``,
and does so when it ends.  ``<code>`` is one of
:data:`hapi_protocol.errors.CODES`.  Bytes are counted at the end of a stream,
whichever end that is.  Timings are milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hapi_protocol.errors import HapiError

OUTCOME_DONE = "done"
OUTCOME_BROKEN = "broken"
OUTCOME_GONE = "gone"


class Metrics:
    """The counters and timings of the table above.

    Args:
        logger: Swift's, with statsd.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to ``hapi.<name>``."""
        self._logger.update_stats(f"hapi.{name}", amount)

    def timing(self, name: str, seconds: float) -> None:
        """One value of ``hapi.<name>.timing``."""
        self._logger.timing(f"hapi.{name}.timing", 1000 * seconds)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """The seconds that the block takes, where it does not raise."""
        begun = time.monotonic()
        yield
        self.timing(name, time.monotonic() - begun)


@dataclass(frozen=True)
class StreamEnd:
    """How a stream that had begun has ended.

    Attributes:
        outcome: ``done``, ``broken``, or ``gone``: its reader closed it.
        error: why it broke.
        source_bytes: sent to the worker.
        sent_bytes: of features that its reader took.
    """

    outcome: str
    error: HapiError | None
    source_bytes: int
    sent_bytes: int


class StreamWatch:
    """Is told of one stream's life, and tells metrics and log.

    Args:
        name: of the source.
        logger: Swift's, with statsd.
    """

    def __init__(self, name: str, logger: Any) -> None:
        self._name = name
        self._logger = logger
        self._metrics = Metrics(logger)
        self._thread_locals = logger.thread_locals
        self._asked = self._begun = time.monotonic()

    def sending(self) -> None:
        """By the thread that is to read and send the source.

        What Swift logs there is about this request, too.
        """
        self._logger.thread_locals = self._thread_locals

    def begun(self) -> None:
        """The first features are there."""
        self._begun = time.monotonic()
        self._metrics.timing("first_byte", self._begun - self._asked)

    def ended(self, end: StreamEnd) -> None:
        """Once, after :meth:`begun`."""
        metrics = self._metrics
        metrics.count(f"streams.{end.outcome}")
        metrics.count("source_bytes", end.source_bytes)
        metrics.count("sent_bytes", end.sent_bytes)
        metrics.timing("stream", time.monotonic() - self._begun)
        if end.error:
            self._logger.warning(
                "hapi: the answer on %s breaks off: %s", self._name, end.error
            )
