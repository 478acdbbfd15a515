"""Features that an account keeps in Swift: what there is, and purging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import SCHEME
from hapi_protocol.errors import ClientError


@dataclass(frozen=True)
class CacheEntry:
    """Features that an account keeps.

    Attributes:
        source: ``container/object`` that they are of.
        key: tells the entries of a source apart.
        length_bytes: that they take.
        stored: when, as in Swift's listings (UTC).
    """

    source: str
    key: str
    length_bytes: int
    stored: str


@dataclass(frozen=True)
class CachePage:
    """A part of what an account keeps.

    Attributes:
        num_entries: of the whole account, as Swift's listings know it.
        length_bytes: likewise.
        entries: of this part.
    """

    num_entries: int
    length_bytes: int
    entries: tuple[CacheEntry, ...]

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> CachePage:
        return cls(
            num_entries=fields["entries"],
            length_bytes=fields["bytes"],
            entries=tuple(
                CacheEntry(
                    each["source"], each["key"], each["bytes"], each["stored"]
                )
                for each in fields["listed"]
            ),
        )


class FeatureCache:
    """What an account keeps; for its owners.

    Args:
        connection: to the account.

    Raises:
        ClientError: from all methods, ``no_hapi`` where nothing keeps
            features, ``bad_configuration`` for a source that is none.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def pages(self, source: str | None = None) -> Iterator[CachePage]:
        """All that is kept, page by page; at least one page.

        Args:
            source: ``container``, or ``container/name`` for an object and
                all those whose names begin with ``name/``; ``swift://``
                before it is allowed.  None for the whole account.
        """
        for page in self._answers("GET", source):
            yield CachePage.from_fields(page)

    def purge(self, source: str | None = None) -> Iterator[int]:
        """Deletes kept features; after each page says how many.

        Args:
            source: as for :meth:`pages`.
        """
        for page in self._answers("DELETE", source):
            yield int(page["deleted"])

    def _answers(
        self, method: str, source: str | None
    ) -> Iterator[dict[str, Any]]:
        asked = [""] if source is None else _sources(source)
        # Swift alone takes both for requests of the account itself.
        if "cache" not in self._connection.require_hapi():
            raise ClientError(
                "no_hapi",
                "the hapi filter of this store is too old to keep features",
            )
        for each in asked:
            yield from self._pages_of(method, each)

    def _pages_of(self, method: str, source: str) -> Iterator[dict[str, Any]]:
        marker: str | None = ""
        while marker is not None:
            query = {"hapi-cache": "", "source": source, "marker": marker}
            page = self._connection.account_request(method, query)
            yield page
            marker = page["marker"]


def _sources(text: str) -> list[str]:
    """What to ask for: the object of that name, and those below it."""
    container, _, name = text.removeprefix(SCHEME).partition("/")
    if not container or ":" in container or "\x00" in text:
        raise ClientError(
            "bad_configuration",
            f"features are kept of no {text!r}; write CONTAINER, "
            "CONTAINER/OBJECT or CONTAINER/PREFIX, with swift:// or without",
        )
    if not name:
        return [container]
    if name.endswith("/"):
        return [f"{container}/{name}"]
    return [f"{container}/{name}", f"{container}/{name}/"]
