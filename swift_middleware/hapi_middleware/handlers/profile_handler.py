"""Handler of ``X-Hapi-Profile``: cost of a package's layers on this host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swift.common.swob import Response

from hapi_middleware.handlers.access_log import add_entry, profile_entry
from hapi_middleware.handlers.context import HandlerContext
from hapi_middleware.places.places import Computers
from hapi_middleware.requests.annotation_request import Env, FeatureRequest
from hapi_middleware.requests.authorization import paying_account
from hapi_middleware.requests.responses import (
    HeadersOnly,
    is_match,
    profile_etag,
    profile_headers,
)
from hapi_middleware.requests.subrequests import Source
from hapi_protocol.headers import ModelPath
from hapi_protocol.job_messages import ModelIdentity, ProfileRequest


@dataclass(eq=False, repr=False)
class ProfileHandler:
    """Handles one request for a profile, from authorization to answer.

    The package is the object that the client's own request names, and is
    read as such: a caller who may GET it, by any right, may see its profile.

    Args:
        context: shared parts of the filter.
        env: WSGI environment of the client's request, its annotation removed.
        request: the parsed annotation.
    """

    context: HandlerContext
    env: Env
    request: FeatureRequest

    def __post_init__(self) -> None:
        request = self.request
        path = ModelPath(request.account, request.container, request.object)
        self._source = Source(self.context.app, self.env, request.name)
        self._package = self.context.package(self.env, path, is_own=True)

    def answer(self) -> Any:
        """Returns a WSGI application: the profile, its headers, or 304.

        Raises:
            SwiftAnswerError: Swift refuses the client's plain request.
            HapiError: any other failure.
        """
        # Authorization first, as for features.
        head = self._source.head()
        model = self._package.identity_from_head(head)
        computers = self.context.places.profiling(self.request.name, head)
        account = paying_account(self.env, self.context.config)
        add_entry(self.env, profile_entry(account))
        etag = self._etag_before_profiling(computers, model)
        if etag and is_match(self.request.if_none_match, etag):
            return HeadersOnly(
                "304 Not Modified", profile_headers(model.etag, etag)
            )
        if self.request.method == "HEAD":
            return HeadersOnly("200 OK", profile_headers(model.etag, etag))
        return self._profile(computers, model, account)

    def _etag_before_profiling(
        self, computers: Computers, model: ModelIdentity
    ) -> str | None:
        """The answer's ETag, if it is known without computing."""
        request = self.request
        if request.method != "HEAD" and not request.if_none_match:
            return None
        info = computers.find_model(model, request.trans_id)
        if info is None:
            return None
        return profile_etag(model.etag, info.digest, info.numerics_tag)

    def _profile(
        self, computers: Computers, model: ModelIdentity, account: str
    ) -> Any:
        request = ProfileRequest(account, model, self.request.trans_id)
        model, profile = computers.get_profile(request, self._package)
        etag = profile_etag(model.etag, profile.digest, profile.numerics_tag)
        headers = profile_headers(model.etag, etag)
        # The ETag is new if the worker had no model before.
        if is_match(self.request.if_none_match, etag):
            return HeadersOnly("304 Not Modified", headers)
        self.context.metrics.count("profiles")
        return Response(status=200, headers=headers, body=profile.to_body())
