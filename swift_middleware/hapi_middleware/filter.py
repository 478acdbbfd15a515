"""The paste filter: annotated GETs of objects are answered with features.

Place it right of the auth middleware and left of ``copy``: there requests
carry ``swift.authorize``, a COPY does not yet look like a GET, and what lies
to the right assembles and decrypts objects for us.

Requests without ``X-Hapi-*`` headers pass untouched.  The headers never pass:
whatever is to the right sees requests as if they had never been there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from swift.common.registry import register_swift_info
from swift.common.swob import Response
from swift.common.utils import get_logger

from hapi_middleware.access_log import (
    HIT_ENTRY,
    AnswerStream,
    LoggedStream,
    UsageQuestion,
    add_entry,
    complete_when_read,
    request_entry,
)
from hapi_middleware.cache import FeatureCache, KeptFeatures
from hapi_middleware.cache_admin import CacheAdmin, is_cache_request
from hapi_middleware.cache_call import CacheCall
from hapi_middleware.concurrency import Timeout
from hapi_middleware.config import FilterConfig
from hapi_middleware.cors import sharing
from hapi_middleware.feature_stream import FeatureStream
from hapi_middleware.metrics import Metrics, StreamWatch
from hapi_middleware.multi import (
    MultiCall,
    is_multi_request,
    parse_multi_request,
)
from hapi_middleware.objects import (
    ObjectBody,
    ObjectHead,
    Package,
    Source,
    SwiftAnswerError,
    job_length,
    source_changed,
)
from hapi_middleware.pipeline import check_place
from hapi_middleware.profiles import ProfileCall
from hapi_middleware.requests import (
    Env,
    FeatureRequest,
    is_annotated,
    is_obeyed,
    parse_request,
    take_annotation,
)
from hapi_middleware.responses import (
    HeadersOnly,
    error_response,
    is_match,
    stream_etag,
    stream_headers,
)
from hapi_middleware.rights import paying_account
from hapi_middleware.uploads import granted
from hapi_middleware.worker_client import WorkerClient
from hapi_protocol.encodings import ENCODINGS
from hapi_protocol.errors import (
    HapiError,
    InternalError,
    TooSlowError,
    UnsupportedError,
)
from hapi_protocol.headers import CACHE_HIT, NUMERICS
from hapi_protocol.messages import (
    KIND_FEATURES,
    KIND_INDEX,
    JobGrant,
    JobRequest,
    ModelIdentity,
)
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
        self.worker = WorkerClient(
            config.worker_socket,
            config.worker_connect_timeout,
            config.worker_timeout,
        )
        self.cache = FeatureCache(app, config, self.metrics, logger)

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
    ) -> FeatureCall | MultiCall | ProfileCall:
        if is_multi_request(env):
            wanted = parse_multi_request(env, headers)
            return MultiCall(
                self.app, self.config, self.logger, self.worker, env, wanted
            )
        request = parse_request(env, headers)
        if not request.annotation.profile:
            return FeatureCall(self, env, request)
        return ProfileCall(
            self.app, self.config, self.metrics, self.worker, env, request
        )

    def _refuse(self, env: Env, error: HapiError) -> Response:
        error.trans_id = error.trans_id or env.get("swift.trans_id")
        self.metrics.count(f"errors.{error.code}")
        if error.status >= 500:
            self.logger.warning("hapi: %s", error)
        return error_response(error, env.get("swift.source") == "S3")


class FeatureCall:
    """One obeyed request, from rights to answer."""

    def __init__(
        self, middleware: HapiMiddleware, env: Env, request: FeatureRequest
    ) -> None:
        self._config = middleware.config
        self._logger = middleware.logger
        self._metrics = middleware.metrics
        self._watch = StreamWatch(request.name, middleware.logger)
        self._worker = middleware.worker
        self._env = env
        self._request = request
        self._annotation = request.annotation
        self._cache = middleware.cache
        self._source = Source(middleware.app, env, request.name)
        self._package = (
            Package(
                middleware.app,
                env,
                request.annotation.model,
                middleware.config.max_package_bytes,
            )
            if request.annotation.model
            else None
        )

    def answer(self) -> Any:
        """A WSGI application: features, their headers, or 304.

        Raises:
            SwiftAnswerError: Swift refuses the client's plain request.
            HapiError: everything else that can go wrong.
        """
        # Rights come first: only who may read both objects learns anything
        # about them from the checks that follow.
        head = self._source.head()
        model = self._package.identify() if self._package else None
        account = paying_account(self._env, self._config)
        add_entry(self._env, request_entry(self._annotation, account))
        job = self._job(head, model, account)
        caching = CacheCall(self._cache, self._env, self._request, head)
        etag = self._known_etag(job, is_wanted=caching.is_used)
        headers = stream_headers(head.etag, etag)
        if etag and is_match(self._request.if_none_match, etag):
            return HeadersOnly("304 Not Modified", headers)
        if self._request.method == "HEAD":
            return HeadersOnly("200 OK", headers)
        kept = caching.find(etag) if etag else None
        if etag and kept is not None:
            return self._kept_response(head, etag, kept)
        return self._features(head, job, caching)

    def _job(
        self, head: ObjectHead, model: ModelIdentity | None, account: str
    ) -> JobRequest:
        annotation = self._annotation
        name = self._request.name
        wanted = annotation.if_source_etag
        if wanted is not None and wanted != head.etag:
            raise source_changed(name, wanted, head.etag)
        length = job_length(
            name, head, annotation.byte_range, self._config.max_object_bytes
        )
        return JobRequest(
            kind=KIND_INDEX if annotation.index else KIND_FEATURES,
            charged_account=account,
            model=model,
            cut=annotation.cut,
            encoding=annotation.encoding,
            transform=annotation.transform,
            numerics=annotation.numerics,
            samples=annotation.samples,
            ranged=annotation.byte_range is not None,
            source_name=name,
            source_etag=head.etag,
            source_length_bytes=length,
            trans_id=self._request.trans_id,
        )

    def _known_etag(self, job: JobRequest, *, is_wanted: bool) -> str | None:
        """The answer's ETag as far as it is known without computing.

        Args:
            is_wanted: even if the request asks for no comparison.
        """
        request = self._request
        if self._annotation.index:
            return stream_etag(self._annotation, job.source_etag, "", "")
        if not job.model or not (
            is_wanted or request.method == "HEAD" or request.if_none_match
        ):
            return None
        info = self._worker.find_model(job.model, job.trans_id)
        if info is None:
            return None
        if job.cut > info.num_cuts:
            raise UnsupportedError(
                "cut_out_of_range",
                f"cut {job.cut} of a model with {info.num_cuts} cuts",
                object_name=job.model.path,
                details={"cut": job.cut, "allowed": [1, info.num_cuts]},
            )
        return stream_etag(
            self._annotation, job.source_etag, info.digest, info.numerics_tag
        )

    def _features(
        self, head: ObjectHead, job: JobRequest, caching: CacheCall
    ) -> Any:
        grant = granted(
            self._worker,
            self._metrics,
            replace(job, is_split=caching.stores),
            self._package,
        )
        etag = stream_etag(
            self._annotation,
            head.etag,
            grant.model_digest or "",
            grant.numerics_tag,
        )
        # Was the model not on this host before?  Then the grant may lapse.
        if is_match(self._request.if_none_match, etag):
            headers = stream_headers(head.etag, etag)
            return HeadersOnly("304 Not Modified", headers)
        kept = caching.find(etag)
        if kept is not None:
            return self._kept_response(head, etag, kept)
        body = self._source.open(head, self._annotation.byte_range)
        stream = self._open(
            grant,
            body,
            job,
            lambda found: caching.wrap(found, etag),
        )
        headers = stream_headers(head.etag, etag, caching.state)
        return self._stream_response(stream, headers)

    def _kept_response(
        self, head: ObjectHead, etag: str, kept: KeptFeatures
    ) -> Response:
        add_entry(self._env, HIT_ENTRY)
        self._metrics.count("kept_answers")
        headers = stream_headers(head.etag, etag, CACHE_HIT)
        headers["Content-Length"] = str(kept.length_bytes)
        return Response(status=200, headers=headers, app_iter=kept)

    def _open(
        self,
        grant: JobGrant,
        body: ObjectBody,
        job: JobRequest,
        wrap: Callable[[FeatureStream], AnswerStream],
    ) -> AnswerStream:
        question = UsageQuestion(
            self._worker, grant.job_id, job.trans_id, self._logger
        )
        if not self._request.is_s3:
            complete_when_read(self._env, question)
        found = self._worker.open_stream(
            grant, body, job.trans_id, self._watch
        )
        question.stream = found
        stream = wrap(found)
        if not self._request.is_s3:
            return stream
        entry = request_entry(self._annotation, job.charged_account)
        return LoggedStream(
            stream, question, entry, job.trans_id, self._logger
        )

    def _stream_response(
        self, stream: AnswerStream, headers: Mapping[str, str]
    ) -> Response:
        # Each batch is worth sending at once.
        self._env["eventlet.minimum_write_chunk_size"] = 0
        return Response(status=200, headers=dict(headers), app_iter=stream)


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
