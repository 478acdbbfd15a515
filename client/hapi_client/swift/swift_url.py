"""Where a data set lies: ``swift://container/prefix``."""

from __future__ import annotations

from dataclasses import dataclass

from hapi_protocol.data_index import INDEX_NAME
from hapi_protocol.errors import ClientError

SCHEME = "swift://"


@dataclass(frozen=True)
class Location:
    """A container and the folder in it, ``""`` for the container itself.

    Shards, index and class names of one data set are the objects
    ``<prefix>/<file>``.
    """

    container: str
    prefix: str = ""

    def __str__(self) -> str:
        tail = f"/{self.prefix}" if self.prefix else ""
        return f"{SCHEME}{self.container}{tail}"

    def object_name(self, file_name: str) -> str:
        """The object that holds ``file_name`` of this data set."""
        return f"{self.prefix}/{file_name}" if self.prefix else file_name

    @property
    def index_name(self) -> str:
        return self.object_name(INDEX_NAME)


def parse_location(text: str) -> Location:
    """Reads ``swift://container/prefix`` or ``container/prefix``.

    Raises:
        ClientError: ``bad_configuration`` naming the value and the form.
    """
    rest = text.removeprefix(SCHEME)
    container, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if (
        not container
        or ":" in container
        or container in (".", "..")
        or "//" in prefix
        or "\x00" in rest
    ):
        raise ClientError(
            "bad_configuration",
            f"{text!r} names no place in Swift; write "
            "swift://CONTAINER or swift://CONTAINER/PREFIX",
        )
    return Location(container, prefix)
