"""Tokens, through keystoneauth1; one per process, shared by its threads."""

from __future__ import annotations

import os
import threading
from typing import Any

from keystoneauth1 import exceptions as auth_errors
from keystoneauth1.session import Session

from hapi_client.swift.credentials import Credentials
from hapi_protocol.errors import ClientError, HapiError, RightsError


class Authenticator:
    """Gets tokens and the storage URL, and renews them when refused.

    Args:
        credentials: who asks.
        timeout_seconds: for each request to the auth service.
        retries: of failed connections to it.
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
        """A token, from the auth service if there is none yet.

        Raises:
            RightsError: ``unauthorized`` when the credentials are wrong.
            ClientError: ``not_connected`` when nobody answers there.
        """
        with self._lock:
            return str(self._ask("get_token"))

    def renewed_token(self, refused: str) -> str:
        """Another token than the ``refused`` one."""
        with self._lock:
            if self._ask("get_token") == refused:
                self._plugin.invalidate()
            return str(self._ask("get_token"))

    def storage_url(self) -> str:
        """URL of the account, without a slash at its end."""
        wanted = self._credentials
        if wanted.storage_url:
            return wanted.storage_url.rstrip("/")
        with self._lock:
            url = self._ask(
                "get_endpoint",
                service_type="object-store",
                interface=wanted.interface,
                region_name=wanted.region_name,
            )
        if not url:
            region = wanted.region_name
            raise ClientError(
                "bad_configuration",
                f"the service catalogue has no {wanted.interface} "
                "object-store endpoint"
                + (f" in region {region!r}" if region else ""),
            )
        return str(url).rstrip("/")

    def _ask(self, method: str, **kwargs: Any) -> Any:
        if self._pid != os.getpid():
            self._session = Session(
                timeout=self._timeout_seconds,
                verify=self._credentials.tls.verify,
                cert=self._credentials.tls.cert,
            )
            self._pid = os.getpid()
        tries_left = self._retries
        while True:
            try:
                return getattr(self._plugin, method)(self._session, **kwargs)
            except auth_errors.RetriableConnectionFailure as error:
                if not tries_left:
                    raise self._error(error) from error
                tries_left -= 1
            except auth_errors.ClientException as error:
                raise self._error(error) from error

    def _error(self, error: Exception) -> HapiError:
        where = self._credentials.auth_url
        trans_id = _trans_id(error)
        if isinstance(error, auth_errors.Unauthorized):
            return RightsError(
                "unauthorized",
                f"{where} refuses the credentials; check user and key",
                trans_id=trans_id,
            )
        if isinstance(error, auth_errors.CatalogException):
            return ClientError(
                "bad_configuration",
                f"the service catalogue of {where} has no such object store: "
                f"{error}; look at region (OS_REGION_NAME) and interface "
                "(OS_INTERFACE)",
            )
        if isinstance(error, auth_errors.SSLError):
            return ClientError(
                "bad_configuration", f"TLS with {where} failed: {error}"
            )
        if isinstance(error, auth_errors.ConnectionError):
            return ClientError(
                "not_connected",
                f"the auth service at {where} does not answer "
                f"({_reason(error)}): does it run, and there?",
            )
        return ClientError(
            "bad_configuration",
            f"authentication at {where} failed: {error}",
            trans_id=trans_id,
        )


def _trans_id(error: Exception) -> str | None:
    """Of the auth service's answer; Swift gives its own by this name, too."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    found = headers.get("X-Openstack-Request-Id")
    return str(found) if found else None


def _reason(error: BaseException) -> str:
    """What is at the bottom of it: the layers above say it once more each."""
    while below := error.__cause__ or error.__context__:
        error = below
    return getattr(error, "strerror", None) or str(error)
