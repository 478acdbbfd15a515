"""Handler of annotated GETs and HEADs of one object."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from swift.common.swob import Response

from hapi_middleware.cache.lookup import CacheLookup
from hapi_middleware.cache.store import CacheEntryBody
from hapi_middleware.concurrency import Timeout
from hapi_middleware.handlers.access_log import (
    HIT_ENTRY,
    AnswerStream,
    LoggedStream,
    UsageQuery,
    add_entry,
    complete_at_logging,
    request_entry,
)
from hapi_middleware.handlers.context import HandlerContext
from hapi_middleware.metrics import StreamReporter
from hapi_middleware.places.computer import AuthorisedJob, Granted
from hapi_middleware.places.places import Computers
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
from hapi_middleware.requests.stored_parts import find_elsewhere
from hapi_middleware.requests.subrequests import (
    ObjectHead,
    Source,
    source_changed_error,
    source_length_for_job,
)
from hapi_protocol.errors import UnsupportedError
from hapi_protocol.headers import CACHE_HIT, HEADER_WORKER, ByteRange
from hapi_protocol.job_messages import (
    KIND_FEATURES,
    KIND_INDEX,
    JobGrant,
    JobRequest,
    ModelIdentity,
)
from hapi_protocol.printable import printable


@dataclass(eq=False, repr=False)
class FeatureHandler:
    """Handles one annotated request, from authorization to answer.

    Args:
        context: shared parts of the filter.
        env: WSGI environment of the client's request, its annotation removed.
        request: the parsed annotation.
    """

    context: HandlerContext
    env: Env
    request: FeatureRequest

    def __post_init__(self) -> None:
        context, request = self.context, self.request
        model = request.annotation.model
        self._annotation = request.annotation
        self._reporter = StreamReporter(request.name, context.logger)
        self._source = Source(context.app, self.env, request.name)
        self._package = context.package(self.env, model) if model else None

    def answer(self) -> Any:
        """Returns a WSGI application: features, their headers, or 304.

        Raises:
            SwiftAnswerError: Swift refuses the client's plain request.
            HapiError: any other failure.
        """
        # Authorization first: the checks below reveal facts about both
        # objects, so the caller must be allowed to read them.
        head = self._source.head(self._annotation.if_source_etag)
        computers = self.context.places.computers(
            self.request.name, head, self._annotation.byte_range
        )
        model = self._package.identify() if self._package else None
        account = paying_account(self.env, self.context.config)
        add_entry(self.env, request_entry(self._annotation, account))
        job = self._job(head, model, account)
        lookup = CacheLookup(
            self.context.cache, self.env, self.request, head, account
        )
        etag = self._etag_before_job(computers, job, is_needed=lookup.is_used)
        headers = stream_headers(head.etag, etag)
        if etag and is_match(self.request.if_none_match, etag):
            return HeadersOnly("304 Not Modified", headers)
        if self.request.method == "HEAD":
            return HeadersOnly("200 OK", headers)
        cached = lookup.find(etag) if etag else None
        if etag and cached is not None:
            return self._cached_response(head, etag, cached)
        return self._compute(computers, head, job, lookup)

    def _job(
        self, head: ObjectHead, model: ModelIdentity | None, account: str
    ) -> JobRequest:
        annotation = self._annotation
        name = self.request.name
        expected_etag = annotation.if_source_etag
        if expected_etag is not None and expected_etag != head.etag:
            raise source_changed_error(name, expected_etag, head.etag)
        length = source_length_for_job(
            name,
            head,
            annotation.byte_range,
            self.context.config.max_object_bytes,
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
            trans_id=self.request.trans_id,
            crc32s=annotation.crc32s,
            span_samples=annotation.span_samples,
        )

    def _etag_before_job(
        self, computers: Computers, job: JobRequest, *, is_needed: bool
    ) -> str | None:
        """The answer's ETag, if it is known without computing.

        Args:
            computers: places that may know the model.
            job: the job that would compute the answer.
            is_needed: ask the worker even if the request compares nothing.
        """
        request = self.request
        if self._annotation.index:
            return stream_etag(self._annotation, job.source_etag, "", "")
        if not job.model or not (
            is_needed or request.method == "HEAD" or request.if_none_match
        ):
            return None
        info = computers.find_model(job.model, job.trans_id)
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

    def _compute(
        self,
        computers: Computers,
        head: ObjectHead,
        job: JobRequest,
        lookup: CacheLookup,
    ) -> Any:
        job = replace(job, is_split=lookup.stores)
        etag = ""
        early: Any = None
        usage_query = UsageQuery(self.context.logger)
        if not self.request.is_s3:
            complete_at_logging(self.env, usage_query)

        def is_answered(granted: Granted) -> bool:
            nonlocal etag, early
            etag = self._etag(job, granted.grant)
            # The ETag is new if the worker had no model before.
            early = self._early_answer(head, etag, lookup)
            if early is None:
                usage_query.add(granted)
            return early is not None

        part = self._annotation.byte_range
        computers = self._next_to_bytes(computers, head, part)
        work = AuthorisedJob(
            job,
            partial(self._source.open, head, part),
            is_repeatable=True,
            package=self._package,
            reporter=self._reporter,
        )
        worker_stream = computers.start(work, is_answered)
        if worker_stream is None:
            return early
        usage_query.stream = worker_stream
        stream: AnswerStream = lookup.wrap(worker_stream, etag)
        if self.request.is_s3:
            entry = request_entry(self._annotation, job.charged_account)
            stream = LoggedStream(
                stream, usage_query, entry, job.trans_id, self.context.logger
            )
        # Each batch is sent at once.
        self.env["eventlet.minimum_write_chunk_size"] = 0
        headers = stream_headers(head.etag, etag, lookup.state)
        headers[HEADER_WORKER] = worker_stream.worker
        return Response(status=200, headers=headers, app_iter=stream)

    def _next_to_bytes(
        self, computers: Computers, head: ObjectHead, part: ByteRange | None
    ) -> Computers:
        """Adds the object servers of a link's target or of a segment."""
        if not self.context.places.prefers_object_servers:
            return computers
        name = self.request.name
        try:
            stored = find_elsewhere(
                self.context.app, self.env, name, head, part
            )
        except (Exception, Timeout):
            # The bytes can be sent instead.
            self.context.logger.exception(
                "hapi: where %s is stored is not known", printable(name)
            )
            stored = None
        return self.context.places.next_to(stored, computers)

    def _early_answer(
        self, head: ObjectHead, etag: str, lookup: CacheLookup
    ) -> Any:
        """The answer if nothing needs to be computed, else None."""
        if is_match(self.request.if_none_match, etag):
            headers = stream_headers(head.etag, etag)
            return HeadersOnly("304 Not Modified", headers)
        cached = lookup.find(etag)
        if cached is not None:
            return self._cached_response(head, etag, cached)
        return None

    def _etag(self, job: JobRequest, grant: JobGrant) -> str:
        return stream_etag(
            self._annotation,
            job.source_etag,
            grant.model_digest or "",
            grant.numerics_tag,
        )

    def _cached_response(
        self, head: ObjectHead, etag: str, cached: CacheEntryBody
    ) -> Response:
        add_entry(self.env, HIT_ENTRY)
        self.context.metrics.count("cached_answers")
        headers = stream_headers(head.etag, etag, CACHE_HIT)
        headers["Content-Length"] = str(cached.length_bytes)
        return Response(status=200, headers=headers, app_iter=cached)
