"""Authenticated HTTP requests with retries, deadlines and named errors."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

import requests
import urllib3

from hapi_client.option_checks import check_integers, check_seconds
from hapi_client.swift.auth import Authenticator
from hapi_client.swift.credentials import Credentials
from hapi_client.swift.response_body import ResponseBody
from hapi_client.swift.retry import Backoff
from hapi_client.swift.traffic_counters import Traffic
from hapi_client.swift.transport import (
    SocketOwners,
    Transport,
    is_certificate_error,
    proxy_text,
)
from hapi_protocol.errors import (
    MAX_BODY_BYTES,
    ClientError,
    HapiError,
    RightsError,
    TooSlowError,
    error_from_body,
)

logger = logging.getLogger(__name__)

OTHER_REPLICAS = 3
"""Times that a large object is asked for again."""
_TAG = re.compile(rb"<[^>]*>")


@dataclass(frozen=True)
class ConnectionOptions:
    """Limits of every wait, and of retries.

    Attributes:
        connect_seconds: timeout of a TCP and TLS connection.
        read_seconds: timeout of the next bytes of a response, headers
            included.
        body_seconds: deadline of a whole body, sent or received.
        num_connections: connections kept open to one host.
        backoff: waits between repeated requests.
    """

    connect_seconds: float = 10.0
    read_seconds: float = 60.0
    body_seconds: float = 3600.0
    num_connections: int = 16
    backoff: Backoff = field(default_factory=Backoff)

    def __post_init__(self) -> None:
        check_integers(self, 1, "num_connections")
        check_seconds(self, "connect_seconds", "read_seconds", "body_seconds")


class RequestBody:
    """A request body: the next bytes of a file, counted as they are sent."""

    def __init__(
        self, file: BinaryIO, length_bytes: int, traffic: Traffic
    ) -> None:
        self._file = file
        self._start = file.tell()
        self._length_bytes = length_bytes
        self._traffic = traffic
        self._position = 0

    def __len__(self) -> int:
        return self._length_bytes

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        """Rewinds the body; urllib3 calls it before a repeated request."""
        self._file.seek(self._start + position)
        self._position = position

    def read(self, size: int = -1) -> bytes:
        remaining = self._length_bytes - self._position
        data = self._file.read(remaining if size < 0 else min(size, remaining))
        self._position += len(data)
        self._traffic.add(sent_bytes=len(data))
        return data


class HttpClient:
    """Sends requests with one user's token.

    A forked child opens its own sockets on first use.
    """

    def __init__(
        self, credentials: Credentials, options: ConnectionOptions
    ) -> None:
        self._credentials = credentials
        self._options = options
        if credentials.tls.insecure:
            logger.warning(
                "TLS certificates are not verified (insecure): anyone on the "
                "path can read the password and the data"
            )
        self.auth = Authenticator(
            credentials,
            timeout_seconds=options.read_seconds,
            retries=options.backoff.attempts - 1,
        )
        self.owners = SocketOwners()
        self.traffic = Traffic()
        self._lock = threading.Lock()
        self._current: Transport | None = None

    def close(self) -> None:
        with self._lock:
            if self._current is not None:
                self._current.close()
                self._current = None

    def open(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        object_name: str,
        source: RequestBody | None = None,
        seconds: float | None = None,
        read_seconds: float | None = None,
        retry: bool = True,
    ) -> ResponseBody:
        """Sends a request and returns the response, its body unread.

        Args:
            method: HTTP method.
            url: absolute URL.
            headers: request headers besides the token.
            object_name: subject of the request, for errors.
            source: request body.
            seconds: deadline of the whole response; None for
                ``body_seconds``.
            read_seconds: timeout of the next bytes; None for the option of
                that name.
            retry: repeat after 429, 5xx and broken connections.

        Raises:
            HapiError: for each status of 300 or more; ``not_connected`` or
                ``too_slow`` if there is no response.
        """
        seconds = seconds or self._options.body_seconds
        deadline = time.monotonic() + seconds
        timeout = (
            self._options.connect_seconds,
            read_seconds or self._options.read_seconds,
        )

        def send(token: str) -> ResponseBody:
            return ResponseBody(
                self._send(
                    method,
                    url,
                    {**(headers or {}), "X-Auth-Token": token},
                    source,
                    object_name,
                    timeout,
                    retry,
                ),
                object_name,
                self.traffic,
                self.owners.scope,
                deadline,
            )

        token = self.auth.token()
        body = send(token)
        for _ in range(OTHER_REPLICAS):
            if body.status != 409 or method != "GET":
                break
            # The large object has an old replica of a segment; Swift reads
            # any of them.
            body.close()
            body = send(token)
        if body.status == 401:
            body.close()
            if source is not None:
                source.seek(0)
            body = send(self.auth.renewed_token(token))
            if body.status == 401:
                raise _token_refused_twice(body, object_name)
        if body.status >= 300:
            raise _error(body, object_name)
        return body

    def _send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        source: RequestBody | None,
        object_name: str,
        timeout: tuple[float, float],
        retry: bool,
    ) -> requests.Response:
        transport = self._transport()
        session = transport.retrying if retry else transport.single_try
        self.traffic.add(requests=1)
        try:
            return session.request(
                method,
                url,
                headers={"Accept-Encoding": "identity", **headers},
                data=source,
                stream=True,
                timeout=timeout,
                allow_redirects=False,
                verify=transport.verify,
            )
        except requests.RequestException as error:
            raise _no_response(
                error, method, url, object_name, timeout
            ) from error

    def _transport(self) -> Transport:
        with self._lock:
            if self._current is None or self._current.pid != os.getpid():
                self._current = Transport(
                    self.owners,
                    self._options.backoff,
                    self.traffic,
                    num_connections=self._options.num_connections,
                    tls=self._credentials.tls,
                )
            return self._current


def _no_response(
    error: requests.RequestException,
    method: str,
    url: str,
    object_name: str,
    timeout: tuple[float, float],
) -> HapiError:
    cause = error.args[0] if error.args else error
    cause = getattr(cause, "reason", None) or cause  # unwraps MaxRetryError
    timeouts = (requests.Timeout, urllib3.exceptions.ReadTimeoutError)
    if isinstance(error, timeouts) or isinstance(cause, timeouts):
        return TooSlowError(
            "too_slow",
            f"{method} {object_name}: no response within {timeout[1]:g} s"
            f"{proxy_text(url)}",
            object_name=object_name,
        )
    if is_certificate_error(cause):
        return ClientError(
            "bad_configuration",
            f"{method} {object_name}: {cause}; set the server's certificate "
            "authority with OS_CACERT or --os-cacert",
            object_name=object_name,
        )
    return ClientError(
        "not_connected",
        f"{method} {object_name}: {cause}{proxy_text(url)}",
        object_name=object_name,
    )


def _error(body: ResponseBody, object_name: str) -> HapiError:
    with body:
        if body.status < 400:
            return _redirected(body, object_name)
        content = body.read(MAX_BODY_BYTES)
    if body.headers.get("Content-Type", "").startswith("text/html"):
        # Swift's own error pages.
        content = b" ".join(_TAG.sub(b" ", content).split())
    return error_from_body(
        body.status,
        content,
        object_name=object_name,
        trans_id=body.trans_id,
        retry_after=_seconds(body.headers.get("Retry-After")),
    )


def _token_refused_twice(body: ResponseBody, object_name: str) -> RightsError:
    body.close()
    return RightsError(
        "unauthorized",
        f"Swift refuses {object_name} with 401, with a new token too; check "
        "that Swift uses this auth service and that the account is yours",
        object_name=object_name,
        trans_id=body.trans_id,
    )


def _redirected(body: ResponseBody, object_name: str) -> ClientError:
    # Neither Swift nor the filter redirects; the token must not be sent on.
    target = body.headers.get("Location", "an unnamed URL")
    return ClientError(
        "bad_configuration",
        f"{object_name}: status {body.status} redirects to {target}, which "
        "is not followed; use an auth service that returns the right "
        "storage URL",
        object_name=object_name,
        trans_id=body.trans_id,
    )


def _seconds(value: str | None) -> float | None:
    # Neither Swift nor the filter sends the other form, a date.
    if value is None or not value.isascii() or not value.isdigit():
        return None
    return float(value)
