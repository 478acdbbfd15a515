"""Swift's v1 login, and connections that stay open."""

from __future__ import annotations

import http.client
from dataclasses import dataclass
from urllib.parse import urlsplit

from benchmarks.opponents.training import Place

SECONDS = 600.0
OK = 200


@dataclass(frozen=True)
class Login:
    """What a login yields.

    Attributes:
        url: of the account.
        token: for ``X-Auth-Token``.
    """

    url: str
    token: str

    @property
    def path(self) -> str:
        """Of the account, on the server."""
        return urlsplit(self.url).path

    def connect(self) -> http.client.HTTPConnection:
        """A connection to the server of the account."""
        return connection(self.url)


def connection(url: str) -> http.client.HTTPConnection:
    """A connection to a URL's server."""
    parts = urlsplit(url)
    kind = {
        "http": http.client.HTTPConnection,
        "https": http.client.HTTPSConnection,
    }[parts.scheme]
    assert parts.hostname is not None
    return kind(parts.hostname, parts.port, timeout=SECONDS)


def log_in(place: Place) -> Login:
    """Logs in.

    Raises:
        OSError: Swift refuses.
    """
    server = connection(place.auth_url)
    try:
        server.request(
            "GET",
            urlsplit(place.auth_url).path,
            headers={"X-Auth-User": place.user, "X-Auth-Key": place.key},
        )
        answer = server.getresponse()
        answer.read()
        if answer.status != OK:
            raise OSError(f"the login was answered {answer.status}")
        return Login(
            answer.headers["X-Storage-Url"], answer.headers["X-Auth-Token"]
        )
    finally:
        server.close()
