"""``POST /v1/<account>/<container>?hapi``: features of many objects.

The objects are read by sub-requests of the caller's own and sent to the
worker as one body.  One that cannot be read is a row with an error, and no
row says more of an object than the caller's plain GET of it would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from swift.common.constraints import valid_api_version
from swift.common.swob import Response
from swift.common.utils import close_if_possible, split_path

from hapi_middleware.handlers.access_log import (
    UsageQuestion,
    add_entry,
    complete_when_read,
    request_entry,
)
from hapi_middleware.handlers.context import HandlerContext
from hapi_middleware.metrics import StreamWatch
from hapi_middleware.requests.annotation_request import (
    Env,
    read_annotation,
    refuse_range,
)
from hapi_middleware.requests.authorization import (
    paying_account,
    refuse_overridden,
)
from hapi_middleware.requests.multi_object_reads import (
    ObjectFrames,
    ObjectReader,
)
from hapi_middleware.requests.object_names import read_names
from hapi_middleware.requests.responses import multi_headers
from hapi_middleware.requests.subrequests import Package, SwiftAnswerError
from hapi_middleware.worker.package_upload import granted
from hapi_protocol.errors import AnnotationError, HapiError, UnavailableError
from hapi_protocol.headers import (
    HEADER_CACHE,
    HEADER_CUT,
    HEADER_IF_SOURCE_ETAG,
    HEADER_INDEX,
    HEADER_MODEL,
    HEADER_PROFILE,
    HEADER_RANGE,
    HEADER_SAMPLES,
    Annotation,
    ModelPath,
)
from hapi_protocol.job_messages import (
    KIND_FEATURES,
    JobGrant,
    JobRequest,
    ModelIdentity,
)

QUERY = "hapi"

_OF_ONE_OBJECT = (
    HEADER_SAMPLES,
    HEADER_RANGE,
    HEADER_IF_SOURCE_ETAG,
    HEADER_INDEX,
    HEADER_PROFILE,
)
_CONDITIONALS = {
    "HTTP_IF_MATCH": "If-Match",
    "HTTP_IF_NONE_MATCH": "If-None-Match",
    "HTTP_IF_MODIFIED_SINCE": "If-Modified-Since",
    "HTTP_IF_UNMODIFIED_SINCE": "If-Unmodified-Since",
    "HTTP_IF_RANGE": "If-Range",
}


@dataclass(frozen=True)
class MultiRequest:
    """A request for many objects, but for their names.

    Attributes:
        container_path: ``/v1/account/container``, decoded.
        model: the annotation's, which has one.
    """

    container_path: str
    annotation: Annotation
    model: ModelPath
    trans_id: str

    @property
    def container(self) -> str:
        """``/account/container``."""
        return "/" + self.container_path.split("/", 2)[2]


def is_multi_request(env: Env) -> bool:
    """Whether this is a client's POST of a container with ``?hapi``.

    It never becomes a POST of the container's metadata.
    """
    return (
        env["REQUEST_METHOD"] == "POST"
        and env.get("swift.source") is None
        and any(name == QUERY for name, _ in _query(env))
        and _container_path(env) is not None
    )


def parse_multi_request(env: Env, headers: Mapping[str, str]) -> MultiRequest:
    """What a request for many objects asks for, by its headers alone.

    Args:
        env: WSGI environment, its annotation already taken.
        headers: that annotation.

    Raises:
        HapiError: naming what is wrong and what is allowed.
    """
    path = _container_path(env)
    assert path is not None, "is_multi_request() has looked"
    refuse_overridden(env)
    _refuse_others(env, headers)
    try:
        decoded = path.encode("latin1").decode("utf-8")
    except ValueError:
        raise AnnotationError(
            "bad_annotation", "the container's name is not UTF-8"
        ) from None
    annotation = read_annotation(headers, decoded.split("/")[2])
    assert annotation.model is not None, "only an index or a profile has none"
    if annotation.cache != "off":
        raise AnnotationError(
            "bad_cache",
            f"{HEADER_CACHE} is {annotation.cache!r}; a request for many "
            "objects is never cached: use off",
        )
    return MultiRequest(
        decoded, annotation, annotation.model, env.get("swift.trans_id", "")
    )


def _query(env: Env) -> list[tuple[str, str]]:
    return parse_qsl(env.get("QUERY_STRING", ""), keep_blank_values=True)


def _container_path(env: Env) -> str | None:
    try:
        version, account, container, name = split_path(
            env["PATH_INFO"], 3, 4, True
        )
    except ValueError:
        return None
    if name or not valid_api_version(version):
        return None
    return f"/{version}/{account}/{container}"


def _refuse_others(env: Env, headers: Mapping[str, str]) -> None:
    """Refuses what has no meaning for many objects."""
    if not headers:
        raise AnnotationError(
            "bad_annotation",
            f"POST of a container with ?{QUERY} asks for features of its "
            f"objects and needs {HEADER_MODEL} and {HEADER_CUT}; leave "
            f"?{QUERY} out to change the container's metadata",
        )
    if _query(env) != [(QUERY, "")]:
        raise AnnotationError(
            "bad_annotation",
            f"the query is {env['QUERY_STRING']!r}; nothing may stand beside "
            f"?{QUERY}",
        )
    refuse_range(env)
    for key, header in _CONDITIONALS.items():
        if key in env:
            raise AnnotationError(
                "conditional_not_allowed",
                f"{header} has no meaning for many objects; leave it out",
            )
    for header in _OF_ONE_OBJECT:
        if header in headers:
            raise AnnotationError(
                "bad_annotation",
                f"{header} has a meaning for one object only; leave it out",
            )


class MultiObjectHandler:
    """One obeyed request for many objects, from rights to answer.

    Args:
        app: the rest of the pipeline.
        config: options of the filter.
        logger: Swift's, with statsd.
        worker: that computes.
        env: of the client's request, its annotation taken off.
        request: what its headers ask for.
    """

    def __init__(
        self, context: HandlerContext, env: Env, request: MultiRequest
    ) -> None:
        app, config, logger = context.app, context.config, context.logger
        self._config = config
        self._logger = logger
        self._metrics = context.metrics
        self._watch = StreamWatch(request.container, logger)
        self._worker = context.worker
        self._env = env
        self._request = request
        self._package = Package(
            app, env, request.model, config.max_package_bytes
        )
        self._reader = ObjectReader(
            app,
            env,
            request.container_path,
            config.max_multi_object_bytes,
            logger,
        )

    def answer(self) -> Any:
        """A WSGI application: the features, or Swift's own refusal.

        Raises:
            SwiftAnswerError: the caller can read none of the objects.
            HapiError: everything else that can go wrong.
        """
        self._metrics.count("multi_requests")
        model = self._package.identify()
        account = paying_account(self._env, self._config)
        names = read_names(self._env, self._config.max_multi_objects)
        annotation = self._request.annotation
        add_entry(self._env, request_entry(annotation, account, len(names)))
        frames = ObjectFrames(
            self._reader.read, names, self._config.multi_concurrency
        )
        try:
            # No place in the worker is taken for what cannot be read.
            if not frames.find_readable():
                raise self._plain_answer(names[0])
            job = self._job(model, account, len(names))
            grant = granted(self._worker, self._metrics, job, self._package)
            return self._features(grant, frames)
        except BaseException:
            frames.close()
            raise

    def _plain_answer(self, name: str) -> SwiftAnswerError | HapiError:
        response = self._reader.get(name)
        if not response.is_success:
            return SwiftAnswerError(response)
        close_if_possible(response.app_iter)
        return UnavailableError(
            "service_unavailable",
            f"none of the objects of {self._request.container} could be read "
            "just now; repeat",
            retry_after=1,
        )

    def _job(
        self, model: ModelIdentity, account: str, num_objects: int
    ) -> JobRequest:
        annotation = self._request.annotation
        return JobRequest(
            kind=KIND_FEATURES,
            charged_account=account,
            model=model,
            cut=annotation.cut,
            encoding=annotation.encoding,
            transform=annotation.transform,
            numerics=annotation.numerics,
            samples=None,
            ranged=False,
            source_name=self._request.container,
            source_etag="",
            source_length_bytes=None,
            trans_id=self._request.trans_id,
            num_objects=num_objects,
        )

    def _features(self, grant: JobGrant, frames: ObjectFrames) -> Response:
        trans_id = self._request.trans_id
        question = UsageQuestion(
            self._worker, grant.job_id, trans_id, self._logger
        )
        complete_when_read(self._env, question)
        stream = self._worker.open_stream(grant, frames, trans_id, self._watch)
        question.stream = stream
        # Each batch is worth sending at once.
        self._env["eventlet.minimum_write_chunk_size"] = 0
        return Response(status=200, headers=multi_headers(), app_iter=stream)
