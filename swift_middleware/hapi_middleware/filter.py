"""The paste filter: answers annotated GETs of objects with features.

It belongs right of the auth middleware and left of ``copy``: there requests
carry ``swift.authorize``, a COPY does not yet look like a GET, and the
filters to the right assemble and decrypt objects.

Requests without ``X-Hapi-*`` headers pass unchanged.  The headers themselves
never pass to the filters on the right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swift.common.registry import register_swift_info
from swift.common.swob import Response
from swift.common.utils import get_logger

from hapi_middleware.cache.admin import CacheAdmin, is_cache_request
from hapi_middleware.cache.store import StoreCache
from hapi_middleware.concurrency import Timeout
from hapi_middleware.config import FilterConfig
from hapi_middleware.cors import with_cors_headers
from hapi_middleware.handlers.context import HandlerContext
from hapi_middleware.handlers.feature_handler import FeatureHandler
from hapi_middleware.handlers.multi_object_handler import (
    MultiObjectHandler,
    is_multi_request,
    parse_multi_request,
)
from hapi_middleware.handlers.profile_handler import ProfileHandler
from hapi_middleware.metrics import FilterMetrics
from hapi_middleware.pipeline_check import check_pipeline_position
from hapi_middleware.places.places import Places
from hapi_middleware.requests.annotation_request import (
    Env,
    is_annotated,
    is_from_client,
    parse_request,
    pop_annotation,
)
from hapi_middleware.requests.package import KnownPackages
from hapi_middleware.requests.responses import (
    HeadersOnly,
    error_response,
)
from hapi_middleware.requests.subrequests import SwiftAnswerError
from hapi_middleware.worker.worker_client import WorkerClient
from hapi_protocol.encodings import ENCODINGS
from hapi_protocol.errors import (
    HapiError,
    InternalError,
    TooSlowError,
)
from hapi_protocol.headers import NUMERICS
from hapi_protocol.printable import printable
from hapi_protocol.transforms import TRANSFORMS
from hapi_protocol.versions import API_VERSION, VERSIONS

StartResponse = Callable[..., Any]
Handler = CacheAdmin | MultiObjectHandler | ProfileHandler | FeatureHandler


class HapiMiddleware:
    """The WSGI filter.  It holds configuration and no state of a request.

    Args:
        app: the rest of the pipeline.
        config: options of the filter.
        logger: Swift's logger, with statsd.

    Raises:
        ValueError: the key of the object servers cannot be used.
    """

    def __init__(self, app: Any, config: FilterConfig, logger: Any) -> None:
        self.logger = logger
        metrics = FilterMetrics(logger)
        worker = WorkerClient(config)
        self.context = HandlerContext(
            app=app,
            config=config,
            logger=logger,
            metrics=metrics,
            places=Places(app, config, worker, metrics, logger),
            cache=StoreCache(app, config, metrics, logger),
            known_packages=KnownPackages(),
        )

    @property
    def app(self) -> Any:
        """The rest of the pipeline; Swift walks it by this name."""
        return self.context.app

    def __call__(self, env: Env, start_response: StartResponse) -> Any:
        answer = self._answer(env)
        if answer is None:
            return self.app(env, start_response)
        self.context.metrics.count("requests")
        return answer(env, with_cors_headers(env, start_response))

    def _choose_handler(self, env: Env) -> Handler | None:
        """Decides which handler answers a request; None for Swift itself.

        Removes the annotation from ``env`` in either case.

        Raises:
            HapiError: the annotation is wrong.
        """
        if is_cache_request(env):
            return CacheAdmin(self.app, env, self.context.metrics)
        is_multi = is_multi_request(env)
        if not is_multi and not is_annotated(env):
            return None
        headers = pop_annotation(env)
        if is_multi:
            multi = parse_multi_request(env, headers)
            return MultiObjectHandler(self.context, env, multi)
        if not headers or not is_from_client(env):
            return None
        request = parse_request(env, headers)
        if request.annotation.profile:
            return ProfileHandler(self.context, env, request)
        return FeatureHandler(self.context, env, request)

    def _answer(self, env: Env) -> Any:
        """The WSGI application that answers; None for Swift itself."""
        try:
            handler = self._choose_handler(env)
            if handler is None:
                return None
            answer = handler.answer()
            if isinstance(answer, HeadersOnly):
                self.context.metrics.count("headers_only")
            return answer
        except SwiftAnswerError as error:
            self.context.metrics.count("swift_answers")
            return error.response
        except HapiError as error:
            return self._refuse(env, error)
        except Timeout as error:
            self.logger.exception("hapi: a sub-request timed out")
            return self._refuse(
                env, TooSlowError("too_slow", f"Swift was too slow: {error}")
            )
        except Exception:
            self.logger.exception("hapi: unexpected failure")
            return self._refuse(
                env,
                InternalError(
                    "internal", "the filter failed; see the proxy's log"
                ),
            )

    def _refuse(self, env: Env, error: HapiError) -> Response:
        error.trans_id = error.trans_id or env.get("swift.trans_id")
        self.context.metrics.count(f"errors.{error.code}")
        if error.status >= 500:
            self.logger.warning("hapi: %s", printable(str(error)))
        return error_response(error, env.get("swift.source") == "S3")


def filter_factory(
    global_conf: Mapping[str, str], **local_conf: str
) -> Callable[[Any], HapiMiddleware]:
    """Paste's entry point (``use = egg:swift-hapi#hapi``).

    Raises:
        ValueError: an unknown option or a bad value; from the returned
            factory: a wrong position in the pipeline.
    """
    config = FilterConfig.from_conf(global_conf, local_conf)
    logger = get_logger({**global_conf, **local_conf}, log_route="hapi")
    register_swift_info(
        "hapi",
        version=API_VERSION,
        versions=list(VERSIONS),
        encodings=list(ENCODINGS),
        transforms=list(TRANSFORMS),
        numerics=list(NUMERICS),
        max_object_bytes=config.max_object_bytes,
        max_package_bytes=config.max_package_bytes,
        index=True,
        profile=True,
        cache=config.cache,
        model_library=config.model_library,
        places=list(config.places),
        multi={
            "max_objects": config.max_multi_objects,
            "max_object_bytes": config.max_multi_object_bytes,
        },
    )

    def factory(app: Any) -> HapiMiddleware:
        check_pipeline_position(app)
        return HapiMiddleware(app, config, logger)

    return factory
