"""Connection to an account whose proxies have the hapi filter."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any
from urllib.parse import quote, urlsplit

import requests

from hapi_client.swift.account import SwiftAccount
from hapi_client.swift.account_session import headers_of
from hapi_client.swift.http_client import RequestBody
from hapi_client.swift.response_body import ResponseBody
from hapi_protocol.errors import ClientError, HapiError
from hapi_protocol.headers import (
    CONTENT_TYPE_STREAM,
    HEADER_PROFILE,
    Annotation,
)
from hapi_protocol.profiles import MAX_PROFILE_BYTES, ModelProfile
from hapi_protocol.versions import common_version


class Connection(SwiftAccount):
    """One user's access to one account and to the features of its objects.

    Args, attributes and errors are those of
    :class:`hapi_client.swift.account.SwiftAccount`.
    """

    def require_hapi(self, *, any_version: bool = False) -> dict[str, Any]:
        """Returns the ``hapi`` section of ``/info``.

        Args:
            any_version: accept a filter with an unsupported version of the
                protocol.

        Raises:
            ClientError: ``no_hapi`` if the proxy has no such filter or does
                not say so,
                ``unsupported_version`` if it has no version of the protocol
                in common with this client.
        """
        proxy = f"the proxy at {urlsplit(self.storage_url).netloc}"
        try:
            with self._open_info() as body:
                section = body.read_json(dict).get("hapi")
                if not isinstance(section, dict):
                    raise ClientError(
                        "no_hapi",
                        f"{proxy} has no hapi filter in its pipeline (no "
                        "'hapi' section in /info); use cut 0 (streaming), or "
                        "ask the operator to add it",
                    )
                if not any_version:
                    common_version(section, proxy, version("swift-hapi"))
                return section
        except HapiError as error:
            is_answer = error.code == "bad_configuration" or (
                400 <= error.status < 500
            )
            if not is_answer or isinstance(
                error.__cause__, requests.RequestException
            ):
                raise
            raise ClientError(
                "no_hapi",
                f"{proxy} does not say whether it has the hapi filter: "
                f"{error.message}; use cut 0 (streaming), or ask the operator "
                "to let /info through (expose_info, and gateways before it)",
                object_name="/info",
                trans_id=error.trans_id,
            ) from error

    def get_features(
        self,
        container: str,
        name: str,
        annotation: Annotation,
        *,
        retry: bool = True,
        seconds: float | None = None,
    ) -> ResponseBody:
        """Opens the feature or index stream of an object (annotated GET).

        Args:
            container: container of the object.
            name: name of the object.
            annotation: the computation to push down.
            retry: repeat on 429 and 5xx before the response begins.
            seconds: deadline of the whole response.

        Raises:
            ClientError: ``no_hapi`` if the response is not a feature stream.
        """
        body = self._open_object(
            "GET",
            container,
            name,
            annotation.to_headers(),
            seconds=seconds,
            retry=retry,
        )
        _check_type(
            body, f"{container}/{name}", CONTENT_TYPE_STREAM, "feature stream"
        )
        return body

    def open_many(
        self,
        container: str,
        names: Sequence[str],
        annotation: Annotation,
        *,
        seconds: float | None = None,
    ) -> ResponseBody:
        """Opens the feature stream of many objects of one container.

        An object that fails becomes a row with an error.  If no object can
        be read, the request fails with the error of the first one.  The
        request is not retried.

        Args:
            container: container of the objects.
            names: images or arrays, repeats allowed; their number is limited
                by ``multi`` in the ``hapi`` section of :meth:`info`.
            annotation: the computation to push down.
            seconds: deadline of the whole response.

        Raises:
            ClientError: ``no_hapi`` if the response is not a feature stream.
        """
        text = "\n".join(map(quote, names)).encode()
        body = self._open(
            "POST",
            f"{self._url(container)}?hapi",
            annotation.to_headers(),
            source=RequestBody(io.BytesIO(text), len(text), self.traffic),
            object_name=container,
            seconds=seconds,
        )
        _check_type(body, container, CONTENT_TYPE_STREAM, "feature stream")
        return body

    def get_profile(
        self,
        container: str,
        name: str,
        *,
        seconds: float,
        account: str | None = None,
    ) -> ModelProfile:
        """Returns the measured costs of a package's layers on a worker.

        The storage host measures them at the first request, which may take
        a minute.  Retried on 429 and 5xx, for example while jobs run there.

        Args:
            container: container of the package.
            name: name of the package.
            seconds: deadline of one attempt.
            account: account of the container; None for :attr:`account`.

        Raises:
            ClientError: ``no_hapi`` if the response is not a profile.
        """
        with self._open_object(
            "GET",
            container,
            name,
            {HEADER_PROFILE: "true"},
            account=account,
            seconds=seconds,
            # Nothing is sent before the whole measurement is done.
            read_seconds=seconds,
        ) as body:
            _check_type(
                body, f"{container}/{name}", "application/json", "profile"
            )
            return ModelProfile.from_body(body.read(MAX_PROFILE_BYTES))

    def ask_worker(self, container: str, name: str) -> None:
        """Checks that the worker responds, by a HEAD with an annotation.

        The filter cannot respond to it without its worker.

        Args:
            container: container of any readable object.
            name: name of the object.
        """
        headers = {HEADER_PROFILE: "true"}
        headers_of(self._open_object("HEAD", container, name, headers))


def _check_type(
    body: ResponseBody, object_name: str, expected: str, kind: str
) -> None:
    """Closes the body and raises ``no_hapi`` if it has another type."""
    content_type = body.headers.get("Content-Type", "")
    if content_type.partition(";")[0].strip() == expected:
        return
    body.close()
    raise ClientError(
        "no_hapi",
        f"{object_name}: the proxy returned "
        f"{content_type or 'no content type'} instead of a {kind}; it has no "
        "hapi filter",
        object_name=object_name,
        trans_id=body.trans_id,
    )
