"""Auth tokens from keystoneauth1, shared by the threads of a process."""

from __future__ import annotations

import os
import threading
from typing import Any

from keystoneauth1 import exceptions as auth_errors
from keystoneauth1.session import Session

from hapi_client.swift.credentials import Credentials
from hapi_client.swift.retry import RETRYABLE_STATUSES
from hapi_client.swift.transport import proxy_text
from hapi_protocol.errors import ClientError, HapiError, RightsError


class Authenticator:
    """Gets tokens and the storage URL, and renews refused tokens.

    Args:
        credentials: user, secret and auth service.
        timeout_seconds: limit of each request to the auth service.
        retries: repeats after a failed connection to the auth service.
    """

    def __init__(
        self, credentials: Credentials, *, timeout_seconds: float, retries: int
    ) -> None:
        self._credentials = credentials
        self._timeout_seconds = timeout_seconds
        self._retries = retries
        self._plugin = credentials.make_plugin()
        self._lock = threading.Lock()
        self._session: Any = None
        self._pid = 0

    def token(self) -> str:
        """Returns the current token; requests one if there is none yet.

        Raises:
            RightsError: ``unauthorized`` if the credentials are wrong.
            ClientError: ``not_connected`` if the auth service is down.
        """
        with self._lock:
            return str(self._call("get_token"))

    def renewed_token(self, refused: str) -> str:
        """Returns a token other than the ``refused`` one."""
        with self._lock:
            if self._call("get_token") == refused:
                self._plugin.invalidate()
            return str(self._call("get_token"))

    def storage_url(self) -> str:
        """Returns the URL of the account, without a trailing slash."""
        credentials = self._credentials
        if credentials.storage_url:
            return credentials.storage_url.rstrip("/")
        with self._lock:
            url = self._call(
                "get_endpoint",
                service_type="object-store",
                interface=credentials.interface,
                region_name=credentials.region_name,
            )
        if not url:
            region = credentials.region_name
            raise ClientError(
                "bad_configuration",
                f"the service catalogue has no {credentials.interface} "
                "object-store endpoint"
                + (f" in region {region!r}" if region else ""),
            )
        return str(url).rstrip("/")

    def _call(self, method: str, **kwargs: Any) -> Any:
        """Calls a method of the plugin; the lock is held."""
        if self._pid != os.getpid():  # a fork must not share our sockets
            self._session = Session(
                timeout=self._timeout_seconds,
                verify=self._credentials.tls.verify,
                cert=self._credentials.tls.cert,
            )
            self._pid = os.getpid()
        retries_left = self._retries
        while True:
            try:
                return getattr(self._plugin, method)(self._session, **kwargs)
            except auth_errors.RetriableConnectionFailure as error:
                if not retries_left:
                    raise self._error(error) from error
                retries_left -= 1
            except auth_errors.ClientException as error:
                raise self._error(error) from error

    def _error(self, error: Exception) -> HapiError:
        url = self._credentials.auth_url
        trans_id = _trans_id(error)
        if isinstance(error, auth_errors.Unauthorized):
            return RightsError(
                "unauthorized",
                f"{url} refuses the credentials; check user and key",
                trans_id=trans_id,
            )
        if isinstance(error, auth_errors.CatalogException):
            return ClientError(
                "bad_configuration",
                f"the service catalogue of {url} has no such object store: "
                f"{error}; check region (OS_REGION_NAME) and interface "
                "(OS_INTERFACE)",
            )
        if isinstance(error, auth_errors.SSLError):
            return ClientError(
                "bad_configuration", f"TLS with {url} failed: {error}"
            )
        if isinstance(error, auth_errors.ConnectionError):
            return ClientError(
                "not_connected",
                f"the auth service at {url} does not answer "
                f"({_root_cause(error)}); check the URL and the service"
                f"{proxy_text(url)}",
            )
        # As after a lost connection, the same request may succeed later.
        status = getattr(error, "http_status", None)
        return ClientError(
            "not_connected"
            if status in RETRYABLE_STATUSES
            else "bad_configuration",
            f"authentication at {url} failed: {error}",
            trans_id=trans_id,
        )


def _trans_id(error: Exception) -> str | None:
    """Returns the request id; Swift's v1 auth sends it under this name too."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    request_id = headers.get("X-Openstack-Request-Id")
    return str(request_id) if request_id else None


def _root_cause(error: BaseException) -> str:
    """Returns the message of the first error of a chain."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return getattr(error, "strerror", None) or str(error)
