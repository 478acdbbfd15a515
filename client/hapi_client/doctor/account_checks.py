"""Checks of credentials and account."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

from hapi_client.doctor.check_runner import WARNING, Finding, check
from hapi_client.swift.connection import Connection
from hapi_client.swift.credentials import Credentials
from hapi_client.swift.http_client import ConnectionOptions
from hapi_client.swift.retry import Backoff
from hapi_protocol.errors import HapiError
from hapi_splitter.units import bytes_text, count_text, seconds_text

REQUESTS_PER_CHECK = 3
"""Deadline of a check, in timeouts of one request."""
MAX_SKEW_SECONDS = 60.0


class AccountChecks:
    """The checks of an account, which open the connection of later ones.

    Args:
        find_credentials: returns the credentials, or raises a HapiError.
        seconds: timeout of one request.
    """

    def __init__(
        self, find_credentials: Callable[[], Credentials], seconds: float
    ) -> None:
        self._find_credentials = find_credentials
        self._seconds = seconds
        self._connection: Connection | None = None

    def connection(self) -> Connection:
        """Returns the connection that the first check has made."""
        assert self._connection is not None, "credentials come first"
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    @check(remedies={"": "'hapi --help' lists their variables"})
    def _credentials(self) -> Finding | str:
        credentials = self._find_credentials()
        seconds = self._seconds
        self._connection = Connection(
            credentials,
            ConnectionOptions(
                connect_seconds=seconds,
                read_seconds=seconds,
                body_seconds=REQUESTS_PER_CHECK * seconds,
                # Retries would hide occasional failures.
                backoff=Backoff(attempts=1),
            ),
        )
        options = credentials.options
        user = options.get("username") or options.get(
            "application_credential_id"
        )
        text = (
            f"{credentials.source}: {credentials.plugin}, {user} at "
            f"{credentials.auth_url}"
        )
        if credentials.tls.insecure:
            return Finding(
                WARNING,
                f"{text}, insecure: TLS certificates are not checked",
                "name their authority by OS_CACERT instead",
            )
        return text

    @check(
        "credentials",
        remedies={
            "unauthorized": "check user, key and project",
            "not_connected": "check the auth URL, the network, and HTTP "
            "proxies (no_proxy)",
            "": "check the auth URL: http or https; v1's ends in /auth/v1.0, "
            "Keystone's in /v3",
        },
    )
    def _auth(self) -> str:
        started = time.monotonic()
        self.connection().log_in()
        return f"a token in {since(started)}"

    @check("auth", remedies={"": "check OS_REGION_NAME and OS_INTERFACE"})
    def _storage_url(self) -> str:
        return self.connection().storage_url

    @check(
        "storage_url",
        remedies={
            "": "check the storage URL (region, interface) and the network"
        },
    )
    def _account(self) -> Finding | str:
        try:
            headers = self.connection().head_account()
        except HapiError as error:
            if error.status != 403:
                raise
            return Finding(
                WARNING,
                "it exists but is not yours",
                "you can read only what its owner shares",
                error.trans_id,
            )
        skew = _skew_seconds(headers.get("Date"))
        if abs(skew) > MAX_SKEW_SECONDS:
            return Finding(
                WARNING,
                f"it responds, but this machine's clock is {skew:+.0f} s "
                "from Swift's",
                "set the clock; tokens and temporary URLs expire by it",
            )
        count = int(headers.get("X-Account-Container-Count", 0))
        used = int(headers.get("X-Account-Bytes-Used", 0))
        return f"{count_text(count, 'container')}, {bytes_text(used)}"


def _skew_seconds(date: str | None) -> float:
    """Returns the seconds by which this machine's clock is ahead of ``date``.

    A missing or unreadable date gives 0.
    """
    now = datetime.now(timezone.utc)
    try:
        return (now - parsedate_to_datetime(date or "")).total_seconds()
    except (TypeError, ValueError):
        return 0.0


def since(started: float) -> str:
    return seconds_text(time.monotonic() - started)
