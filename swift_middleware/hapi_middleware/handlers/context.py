"""Parts of the filter that the handlers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hapi_middleware.cache.store import StoreCache
from hapi_middleware.config import FilterConfig
from hapi_middleware.metrics import FilterMetrics
from hapi_middleware.places.places import Places
from hapi_middleware.requests.annotation_request import Env
from hapi_middleware.requests.package import KnownPackages, Package
from hapi_protocol.headers import ModelPath


@dataclass(frozen=True)
class HandlerContext:
    """Parts of the filter that the handlers of all requests share.

    Attributes:
        app: the WSGI application to the right of the filter.
        config: options of the filter.
        logger: Swift's, with statsd.
        metrics: counters of the filter.
        places: places that compute.
        cache: features cached in Swift.
        known_packages: packages that this process has just looked at.
    """

    app: Any
    config: FilterConfig
    logger: Any
    metrics: FilterMetrics
    places: Places
    cache: StoreCache
    known_packages: KnownPackages

    def package(
        self, env: Env, path: ModelPath, *, is_own: bool = False
    ) -> Package:
        """The package of a request, see :class:`.Package`."""
        max_bytes = self.config.max_package_bytes
        known = None if is_own else self.known_packages
        return Package(
            self.app, env, path, max_bytes, is_own=is_own, known=known
        )
