"""Handler of ``X-Hapi-Profile``: cost of a package's layers on this host."""

from __future__ import annotations

from typing import Any

from swift.common.swob import Response

from hapi_middleware.handlers.access_log import add_entry, profile_entry
from hapi_middleware.handlers.context import HandlerContext
from hapi_middleware.places.places import Computers
from hapi_middleware.requests.annotation_request import Env, FeatureRequest
from hapi_middleware.requests.authorization import paying_account
from hapi_middleware.requests.package import Package
from hapi_middleware.requests.responses import (
    HeadersOnly,
    is_match,
    profile_etag,
    profile_headers,
)
from hapi_middleware.requests.subrequests import Source
from hapi_protocol.headers import ModelPath
from hapi_protocol.job_messages import ModelIdentity, ProfileRequest


class ProfileHandler:
    """Handles one request for a profile, from authorization to answer.

    The package is the object that the client's own request names, and is
    read as such: a caller who may GET it, by any right, may see its profile.

    Args:
        context: shared parts of the filter.
        env: WSGI environment of the client's request, its annotation removed.
        request: the parsed annotation.
    """

    def __init__(
        self, context: HandlerContext, env: Env, request: FeatureRequest
    ) -> None:
        app, config = context.app, context.config
        self._config = config
        self._metrics = context.metrics
        self._places = context.places
        self._env = env
        self._request = request
        self._source = Source(app, env, request.name)
        self._package = Package(
            app,
            env,
            ModelPath(request.account, request.container, request.object),
            config.max_package_bytes,
            is_own=True,
        )

    def answer(self) -> Any:
        """Returns a WSGI application: the profile, its headers, or 304.

        Raises:
            SwiftAnswerError: Swift refuses the client's plain request.
            HapiError: any other failure.
        """
        # Authorization first, as for features.
        head = self._source.head()
        model = self._package.identity_from_head(head)
        computers = self._places.profiling(self._request.name, head)
        account = paying_account(self._env, self._config)
        add_entry(self._env, profile_entry(account))
        etag = self._etag_before_profiling(computers, model)
        if etag and is_match(self._request.if_none_match, etag):
            return HeadersOnly(
                "304 Not Modified", profile_headers(model.etag, etag)
            )
        if self._request.method == "HEAD":
            return HeadersOnly("200 OK", profile_headers(model.etag, etag))
        return self._profile(computers, model, account)

    def _etag_before_profiling(
        self, computers: Computers, model: ModelIdentity
    ) -> str | None:
        """The answer's ETag, if it is known without computing."""
        request = self._request
        if request.method != "HEAD" and not request.if_none_match:
            return None
        info = computers.find_model(model, request.trans_id)
        if info is None:
            return None
        return profile_etag(model.etag, info.digest, info.numerics_tag)

    def _profile(
        self, computers: Computers, model: ModelIdentity, account: str
    ) -> Any:
        request = ProfileRequest(account, model, self._request.trans_id)
        model, profile = computers.get_profile(request, self._package)
        etag = profile_etag(model.etag, profile.digest, profile.numerics_tag)
        headers = profile_headers(model.etag, etag)
        # The ETag is new if the worker had no model before.
        if is_match(self._request.if_none_match, etag):
            return HeadersOnly("304 Not Modified", headers)
        self._metrics.count("profiles")
        return Response(status=200, headers=headers, body=profile.to_body())
