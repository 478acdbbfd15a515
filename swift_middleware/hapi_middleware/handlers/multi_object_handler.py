"""Handler of ``POST /v1/<account>/<container>?hapi``: many objects.

The objects are read by sub-requests with the caller's own rights and sent to
the worker as one body; if object servers compute, by those that have them
(:mod:`hapi_middleware.handlers.fan_out`).  An object that cannot be read is a
row with an error.
No row reveals more about an object than the caller's plain GET of it would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from swift.common.constraints import valid_api_version
from swift.common.swob import Response
from swift.common.utils import close_if_possible, split_path

from hapi_middleware.handlers.access_log import (
    UsageQuery,
    add_entry,
    complete_at_logging,
    request_entry,
)
from hapi_middleware.handlers.context import HandlerContext
from hapi_middleware.handlers.fan_out import FanOut
from hapi_middleware.metrics import StreamReporter
from hapi_middleware.places.computer import AuthorisedJob
from hapi_middleware.places.places import Computers
from hapi_middleware.requests.annotation_request import (
    Env,
    read_annotation,
    refuse_range,
)
from hapi_middleware.requests.authorization import (
    paying_account,
    refuse_delegated,
)
from hapi_middleware.requests.multi_object_reads import (
    FramedObjects,
    ObjectReader,
)
from hapi_middleware.requests.object_names import read_object_names
from hapi_middleware.requests.responses import multi_headers
from hapi_middleware.requests.subrequests import SwiftAnswerError
from hapi_middleware.worker.feature_stream import WorkerStream
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
    HEADER_WORKER,
    Annotation,
    ModelPath,
)
from hapi_protocol.job_messages import (
    KIND_FEATURES,
    JobRequest,
    ModelIdentity,
)

QUERY = "hapi"

_SINGLE_OBJECT_HEADERS = (
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
    """A request for many objects, without their names.

    Attributes:
        container_path: ``/v1/account/container``, decoded.
        annotation: the parsed headers.
        model: the annotation's model; it always has one.
        trans_id: transaction id of the request.
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
    """Returns True for a client's POST of a container with ``?hapi``.

    Such a request never becomes a POST of the container's metadata.
    """
    return (
        env["REQUEST_METHOD"] == "POST"
        and env.get("swift.source") is None
        and any(name == QUERY for name, _ in _query(env))
        and _container_path(env) is not None
    )


def parse_multi_request(env: Env, headers: Mapping[str, str]) -> MultiRequest:
    """Parses the headers of a request for many objects.

    Args:
        env: WSGI environment, its annotation removed.
        headers: that annotation.

    Raises:
        HapiError: names what is wrong and what is allowed.
    """
    path = _container_path(env)
    assert path is not None, "is_multi_request() has checked it"
    refuse_delegated(env)
    _refuse_single_object_options(env, headers)
    try:
        decoded = path.encode("latin1").decode("utf-8")
    except ValueError:
        raise AnnotationError(
            "bad_annotation", "the container's name is not UTF-8"
        ) from None
    annotation = read_annotation(headers, decoded.split("/")[2])
    assert annotation.model is not None, "index and profile are refused above"
    if annotation.cache != "off":
        raise AnnotationError(
            "bad_cache",
            f"{HEADER_CACHE} is {annotation.cache!r}; requests for many "
            "objects are not cached: use off",
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


def _refuse_single_object_options(
    env: Env, headers: Mapping[str, str]
) -> None:
    if not headers:
        raise AnnotationError(
            "bad_annotation",
            f"POST of a container with ?{QUERY} asks for features of its "
            f"objects and needs {HEADER_MODEL} and {HEADER_CUT}; omit "
            f"?{QUERY} to change the container's metadata",
        )
    if _query(env) != [(QUERY, "")]:
        raise AnnotationError(
            "bad_annotation",
            f"the query is {env['QUERY_STRING']!r}; it must be ?{QUERY} alone",
        )
    refuse_range(env)
    for key, header in _CONDITIONALS.items():
        if key in env:
            raise AnnotationError(
                "conditional_not_allowed",
                f"{header} is not allowed for many objects; omit it",
            )
    for header in _SINGLE_OBJECT_HEADERS:
        if header in headers:
            raise AnnotationError(
                "bad_annotation",
                f"{header} is allowed for a single object only; omit it",
            )


@dataclass(eq=False, repr=False)
class MultiObjectHandler:
    """Handles one request for many objects, from authorization to answer.

    Args:
        context: shared parts of the filter.
        env: WSGI environment of the client's request, its annotation removed.
        request: the parsed headers.
    """

    context: HandlerContext
    env: Env
    request: MultiRequest

    def __post_init__(self) -> None:
        context, request = self.context, self.request
        self._reporter = StreamReporter(request.container, context.logger)
        self._package = context.package(self.env, request.model)
        self._reader = ObjectReader(
            context.app,
            self.env,
            request.container_path,
            context.config.max_multi_object_bytes,
            context.logger,
        )

    def answer(self) -> Any:
        """Returns a WSGI application that streams the features.

        Raises:
            SwiftAnswerError: the caller can read none of the objects.
            HapiError: any other failure.
        """
        self.context.metrics.count("multi_requests")
        model = self._package.identify()
        computers = self.context.places.receiving(
            self._package.name, self._package.head
        )
        account = paying_account(self.env, self.context.config)
        names = read_object_names(
            self.env, self.context.config.max_multi_objects
        )
        annotation = self.request.annotation
        add_entry(self.env, request_entry(annotation, account, len(names)))
        job = self._job(model, account, len(names))
        usage_query = UsageQuery(self.context.logger)
        complete_at_logging(self.env, usage_query)
        is_spread = self.context.places.prefers_object_servers
        start = self._fan_out if is_spread else self._send
        usage_query.stream = stream = start(computers, job, names, usage_query)
        # Each batch is sent at once.
        self.env["eventlet.minimum_write_chunk_size"] = 0
        headers = multi_headers() | {HEADER_WORKER: stream.worker}
        return Response(status=200, headers=headers, app_iter=stream)

    def _plain_answer(self, name: str) -> SwiftAnswerError | HapiError:
        response = self._reader.get(name)
        if not response.is_success:
            return SwiftAnswerError(response)
        close_if_possible(response.app_iter)
        return UnavailableError(
            "service_unavailable",
            f"none of the objects of {self.request.container} could be read; "
            "retry",
            retry_after=1,
        )

    def _job(
        self, model: ModelIdentity, account: str, num_objects: int
    ) -> JobRequest:
        annotation = self.request.annotation
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
            source_name=self.request.container,
            source_etag="",
            source_length_bytes=None,
            trans_id=self.request.trans_id,
            num_objects=num_objects,
            span_samples=annotation.span_samples,
        )

    def _send(
        self,
        computers: Computers,
        job: JobRequest,
        names: Sequence[str],
        usage_query: UsageQuery,
    ) -> WorkerStream:
        """Reads all objects and sends them to a place that computes."""
        frames = FramedObjects(
            self._reader.read,
            enumerate(names),
            self.context.config.multi_concurrency,
        )

        work = AuthorisedJob(
            job,
            lambda: frames,
            is_repeatable=False,
            package=self._package,
            reporter=self._reporter,
        )
        try:
            # Unreadable objects must not take a slot of the worker.
            if not frames.fetch_first_readable():
                raise self._plain_answer(names[0])
            return computers.begin(work, usage_query.add)
        except BaseException:
            frames.close()
            raise

    def _fan_out(
        self,
        computers: Computers,
        job: JobRequest,
        names: Sequence[str],
        usage_query: UsageQuery,
    ) -> WorkerStream:
        """Spreads the objects over the object servers that have them."""
        fan_out = FanOut(
            self.context.places,
            computers,
            self._reader,
            job,
            self._package,
            names,
            concurrency=self.context.config.multi_concurrency,
            max_object_bytes=self.context.config.max_multi_object_bytes,
            usage_query=usage_query,
            reporter=self._reporter,
        )
        try:
            if not fan_out.find_readable():
                raise self._plain_answer(names[0])
            return fan_out.start()
        except BaseException:
            fan_out.close()
            raise
