"""Requests to a Swift account: authentication, traffic, cancellation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from hapi_client.swift.credentials import Credentials
from hapi_client.swift.http_client import ConnectionOptions, HttpClient
from hapi_client.swift.response_body import ResponseBody
from hapi_client.swift.traffic_counters import Traffic
from hapi_client.swift.transport import CancelScope
from hapi_protocol.headers import ModelPath

T = TypeVar("T", bound="AccountSession")


class AccountSession:
    """One user's requests to one account, from any threads and forks.

    A forked child opens its own sockets on first use.

    Args:
        credentials: None reads the environment, as ``swift`` does.
        read_seconds: longest wait for the next bytes of a response.
        options: all limits of waits and retries instead of ``read_seconds``;
            internal.

    Attributes:
        credentials: the given credentials, or those of the environment.
        options: limits of waits and retries.

    Raises:
        HapiError: from every method, with status, code, object name and
            ``X-Trans-Id`` if Swift sent them.
    """

    def __init__(
        self,
        credentials: Credentials | None = None,
        options: ConnectionOptions | None = None,
        *,
        read_seconds: float = ConnectionOptions.read_seconds,
    ) -> None:
        self.credentials = credentials or Credentials.from_environment(
            os.environ
        )
        self.options = options or ConnectionOptions(read_seconds=read_seconds)
        self._http = HttpClient(self.credentials, self.options)
        self._open = self._http.open

    @property
    def traffic(self) -> Traffic:
        return self._http.traffic

    @property
    def storage_url(self) -> str:
        """``https://host/v1/account``, without a trailing slash."""
        return self._http.auth.storage_url()

    @property
    def account(self) -> str:
        return self.storage_url.rpartition("/")[2]

    def model_path(self, container: str, name: str) -> ModelPath:
        return ModelPath(self.account, container, name)

    def close(self) -> None:
        """Closes all sockets; the next request opens new ones."""
        self._http.close()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def working_for(self, scope: CancelScope) -> AbstractContextManager[None]:
        """Ties the requests of this thread to ``scope``."""
        return self._http.owners.working_for(scope)

    def cancel(self, scope: CancelScope) -> None:
        """Ends all current and future requests of ``scope``."""
        self._http.owners.cancel(scope)

    def info(self) -> dict[str, Any]:
        """Returns the proxy's ``/info`` document."""
        with self._open_info() as body:
            return body.read_json(dict)

    def _open_info(self) -> ResponseBody:
        parts = urlsplit(self.storage_url)
        url = f"{parts.scheme}://{parts.netloc}/info"
        return self._open("GET", url, object_name="/info")

    def log_in(self) -> None:
        """Gets a token unless there is one already."""
        self._http.auth.token()

    def head_account(self) -> Mapping[str, str]:
        """Returns the headers of a HEAD of the account."""
        name = f"account {self.account}"
        return headers_of(
            self._open("HEAD", self.storage_url, object_name=name)
        )

    def account_request(
        self,
        method: str,
        query: Mapping[str, str],
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """Sends a request for the account and returns the JSON response.

        Args:
            method: HTTP method.
            query: parameters of the URL.
            seconds: deadline of a single attempt; None for the default
                deadline with retries.
        """
        url = f"{self.storage_url}?{urlencode(query)}"
        with self._open(
            method,
            url,
            object_name=f"?{next(iter(query), '')}",
            seconds=seconds,
            read_seconds=seconds,
            retry=seconds is None,
        ) as body:
            return body.read_json(dict)

    def _url(self, *parts: str, account: str | None = None) -> str:
        """The URL of a container, or of an object in it.

        A container of another account is ``/account/container``.
        """
        url = self.storage_url
        container, *rest = parts
        if container.startswith("/"):
            account, _, container = container[1:].partition("/")
            parts = (container, *rest)
        if account is not None:
            url = f"{url.rpartition('/')[0]}/{quote(account)}"
        return url + "".join("/" + quote(part) for part in parts)

    def _open_object(
        self,
        method: str,
        container: str,
        name: str,
        headers: Mapping[str, str] | None = None,
        *,
        account: str | None = None,
        query: Mapping[str, str] | None = None,
        **options: Any,
    ) -> ResponseBody:
        """Sends a request for an object; see :meth:`HttpClient.open`."""
        url = self._url(container, name, account=account)
        return self._open(
            method,
            f"{url}?{urlencode(query)}" if query else url,
            headers,
            object_name=f"{container}/{name}",
            **options,
        )


def headers_of(body: ResponseBody) -> Mapping[str, str]:
    """Returns the headers of a response; discards and closes its body."""
    with body:
        body.read()
        return body.headers
