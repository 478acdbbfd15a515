"""The parts of the filter that every handler works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hapi_middleware.cache.store import FeatureCache
from hapi_middleware.config import FilterConfig
from hapi_middleware.metrics import Metrics
from hapi_middleware.worker.worker_client import WorkerClient


@dataclass(frozen=True)
class HandlerContext:
    """Parts of the filter, shared by the handlers of all requests.

    Attributes:
        app: the WSGI application to the right of the filter.
        config: of the filter.
        logger: Swift's.
        metrics: counters of the filter.
        worker: client of this host's worker.
        cache: features cached in Swift.
    """

    app: Any
    config: FilterConfig
    logger: Any
    metrics: Metrics
    worker: WorkerClient
    cache: FeatureCache
