"""Handles one annotated GET of an object: authorization to answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from swift.common.swob import Response

from hapi_middleware.cache.lookup import CacheLookup
from hapi_middleware.cache.store import KeptFeatures
from hapi_middleware.handlers.access_log import (
    HIT_ENTRY,
    AnswerStream,
    LoggedStream,
    UsageQuestion,
    add_entry,
    complete_when_read,
    request_entry,
)
from hapi_middleware.handlers.context import HandlerContext
from hapi_middleware.metrics import StreamWatch
from hapi_middleware.requests.annotation_request import (
    Env,
    FeatureRequest,
)
from hapi_middleware.requests.authorization import paying_account
from hapi_middleware.requests.responses import (
    HeadersOnly,
    is_match,
    stream_etag,
    stream_headers,
)
from hapi_middleware.requests.subrequests import (
    ObjectBody,
    ObjectHead,
    Package,
    Source,
    job_length,
    source_changed,
)
from hapi_middleware.worker.feature_stream import FeatureStream
from hapi_middleware.worker.package_upload import granted
from hapi_protocol.errors import UnsupportedError
from hapi_protocol.headers import CACHE_HIT
from hapi_protocol.job_messages import (
    KIND_FEATURES,
    KIND_INDEX,
    JobGrant,
    JobRequest,
    ModelIdentity,
)


class FeatureHandler:
    """One obeyed request, from rights to answer."""

    def __init__(
        self, context: HandlerContext, env: Env, request: FeatureRequest
    ) -> None:
        self._config = context.config
        self._logger = context.logger
        self._metrics = context.metrics
        self._watch = StreamWatch(request.name, context.logger)
        self._worker = context.worker
        self._env = env
        self._request = request
        self._annotation = request.annotation
        self._cache = context.cache
        self._source = Source(context.app, env, request.name)
        self._package = (
            Package(
                context.app,
                env,
                request.annotation.model,
                context.config.max_package_bytes,
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
        caching = CacheLookup(self._cache, self._env, self._request, head)
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
        self, head: ObjectHead, job: JobRequest, caching: CacheLookup
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
