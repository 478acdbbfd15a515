"""Locations of data sets: ``swift://container/prefix``."""

from __future__ import annotations

from dataclasses import dataclass

from hapi_protocol.data_index import INDEX_NAME
from hapi_protocol.errors import ClientError

SCHEME = "swift://"


@dataclass(frozen=True)
class Location:
    """A container and a folder in it; prefix ``""`` is the container itself.

    Shards and index of a data set are the objects ``<prefix>/<file>``.  A
    container of another account is ``/account/container``.
    """

    container: str
    prefix: str = ""

    def __str__(self) -> str:
        tail = f"/{self.prefix}" if self.prefix else ""
        return f"{SCHEME}{self.container}{tail}"

    def object_name(self, file_name: str) -> str:
        """Returns the object name of a file of this data set."""
        return f"{self.prefix}/{file_name}" if self.prefix else file_name

    @property
    def index_name(self) -> str:
        return self.object_name(INDEX_NAME)


def parse_location(text: str) -> Location:
    """Parses ``swift://container/prefix`` or ``container/prefix``.

    Another account is ``swift:///account/container/prefix``.

    Raises:
        ClientError: ``bad_configuration`` naming the value and the format.
    """
    rest = text.removeprefix(SCHEME)
    account = ""
    if rest.startswith("/"):
        account, _, rest = rest[1:].partition("/")
        account = f"/{account}/"
    container, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if (
        not container
        or account == "//"
        or ":" in account
        or ":" in container
        or container in (".", "..")
        or "//" in prefix
        or "\x00" in rest
    ):
        raise ClientError(
            "bad_configuration",
            f"{text!r} is not a Swift location; write swift://CONTAINER or "
            "swift://CONTAINER/PREFIX, or swift:///ACCOUNT/CONTAINER/PREFIX "
            "for another account",
        )
    return Location(account + container, prefix)
