"""The paste filter: annotated GETs of objects are answered with features.

Place it right of the auth middleware and left of ``copy``: there requests
carry ``swift.authorize``, a COPY does not yet look like a GET, and what lies
to the right assembles and decrypts objects for us.

Requests without ``X-Hapi-*`` headers pass untouched.  The headers never pass:
whatever is to the right sees requests as if they had never been there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swift.common.registry import register_swift_info
from swift.common.swob import Response
from swift.common.utils import get_logger

from hapi_middleware.cache.admin import CacheAdmin, is_cache_request
from hapi_middleware.cache.store import FeatureCache
from hapi_middleware.concurrency import Timeout
from hapi_middleware.config import FilterConfig
from hapi_middleware.cors import sharing
from hapi_middleware.handlers.context import HandlerContext
from hapi_middleware.handlers.feature_handler import FeatureHandler
from hapi_middleware.handlers.multi_object_handler import (
    MultiObjectHandler,
    is_multi_request,
    parse_multi_request,
)
from hapi_middleware.handlers.profile_handler import ProfileHandler
from hapi_middleware.metrics import Metrics
from hapi_middleware.pipeline_check import check_place
from hapi_middleware.requests.annotation_request import (
    Env,
    is_annotated,
    is_obeyed,
    parse_request,
    take_annotation,
)
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
from hapi_protocol.transforms import TRANSFORMS
from hapi_protocol.versions import API_VERSION, VERSIONS

StartResponse = Callable[..., Any]


class HapiMiddleware:
    """WSGI filter; holds configuration, never state of a request.

    Args:
        app: the rest of the pipeline.
        config: options of the filter.
        logger: Swift's logger, with statsd.
    """

    def __init__(self, app: Any, config: FilterConfig, logger: Any) -> None:
        self.app = app
        self.config = config
        self.logger = logger
        self.metrics = Metrics(logger)
        self.context = HandlerContext(
            app=app,
            config=config,
            logger=logger,
            metrics=self.metrics,
            worker=WorkerClient(
                config.worker_socket,
                config.worker_connect_timeout,
                config.worker_timeout,
            ),
            cache=FeatureCache(app, config, self.metrics, logger),
        )

    def __call__(self, env: Env, start_response: StartResponse) -> Any:
        if is_cache_request(env):
            self.metrics.count("requests")
            answer = self._guarded(env, lambda: self._tend_cache(env))
            return answer(env, start_response)
        is_multi = is_multi_request(env)
        if not is_multi and not is_annotated(env):
            return self.app(env, start_response)
        headers = take_annotation(env)
        if not is_multi and not (headers and is_obeyed(env)):
            return self.app(env, start_response)
        self.metrics.count("requests")
        answer = self._guarded(env, lambda: self._call(env, headers).answer())
        return answer(env, sharing(env, start_response))

    def _guarded(self, env: Env, answer: Callable[[], Any]) -> Any:
        """A WSGI application, whatever happens meanwhile."""
        try:
            found = answer()
            if isinstance(found, HeadersOnly):
                self.metrics.count("headers_only")
            return found
        except SwiftAnswerError as error:
            self.metrics.count("swift_answers")
            return error.response
        except HapiError as error:
            return self._refuse(env, error)
        except Timeout as error:
            self.logger.exception("hapi: a sub-request ran out of time")
            return self._refuse(
                env, TooSlowError("too_slow", f"Swift was too slow: {error}")
            )
        except Exception:
            self.logger.exception("hapi: unexpected failure")
            return self._refuse(
                env,
                InternalError(
                    "internal", "the filter failed; its log says where"
                ),
            )

    def _tend_cache(self, env: Env) -> Any:
        answer = CacheAdmin(self.app, env).answer()
        self.metrics.count("cache_requests")
        return answer

    def _call(
        self, env: Env, headers: Mapping[str, str]
    ) -> FeatureHandler | MultiObjectHandler | ProfileHandler:
        if is_multi_request(env):
            wanted = parse_multi_request(env, headers)
            return MultiObjectHandler(self.context, env, wanted)
        request = parse_request(env, headers)
        if not request.annotation.profile:
            return FeatureHandler(self.context, env, request)
        return ProfileHandler(self.context, env, request)

    def _refuse(self, env: Env, error: HapiError) -> Response:
        error.trans_id = error.trans_id or env.get("swift.trans_id")
        self.metrics.count(f"errors.{error.code}")
        if error.status >= 500:
            self.logger.warning("hapi: %s", error)
        return error_response(error, env.get("swift.source") == "S3")


def filter_factory(
    global_conf: Mapping[str, str], **local_conf: str
) -> Callable[[Any], HapiMiddleware]:
    """Paste's entry point (``use = egg:swift-hapi#hapi``).

    Raises:
        ValueError: for an unknown option or a bad value, or, from what is
            returned, for a bad place in the pipeline.
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
        multi={
            "max_objects": config.max_multi_objects,
            "max_object_bytes": config.max_multi_object_bytes,
        },
    )

    def factory(app: Any) -> HapiMiddleware:
        check_place(app)
        return HapiMiddleware(app, config, logger)

    return factory
