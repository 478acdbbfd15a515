"""Administration of an account's feature cache: listing and purging."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import SCHEME
from hapi_protocol.errors import ClientError, TooSlowError


@dataclass(frozen=True)
class CacheEntry:
    """An entry of the feature cache.

    Attributes:
        source: ``container/object`` from which the features were computed.
        key: key of the entry among those of its source.
        length_bytes: size of the features.
        stored: time of storage as in Swift's listings (UTC).
    """

    source: str
    key: str
    length_bytes: int
    stored: str


@dataclass(frozen=True)
class CachePage:
    """A page of the listing of an account's feature cache.

    Attributes:
        num_entries: entries of the whole account, by Swift's listings.
        length_bytes: bytes of the whole account, by Swift's listings.
        entries: entries of this page.
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
                    entry["source"],
                    entry["key"],
                    entry["bytes"],
                    entry["stored"],
                )
                for entry in fields["listed"]
            ),
        )


class CacheAdminClient:
    """The feature cache of an account; for the account's owners.

    Args:
        connection: connection to the account.

    Raises:
        ClientError: from all methods: ``no_hapi`` if the store has no
            feature cache, ``bad_configuration`` for an invalid source.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def pages(
        self,
        source: str | None = None,
        *,
        limit: int | None = None,
        seconds: float | None = None,
    ) -> Iterator[CachePage]:
        """Lists all entries, page by page; yields at least one page.

        Args:
            source: ``container``, or ``container/name`` for an object and
                all objects whose names begin with ``name/``.  The
                ``swift://`` prefix is optional.  None for the whole account.
            limit: maximum number of entries of a page; None for the store's
                default.
            seconds: deadline of all pages together; None for none.

        Raises:
            TooSlowError: if the deadline passes.
        """
        for page in self._pages("GET", source, limit, seconds):
            yield CachePage.from_fields(page)

    def purge(self, source: str | None = None) -> Iterator[int]:
        """Deletes entries; yields the number of each page.

        Args:
            source: object or prefix as for :meth:`pages`.
        """
        for page in self._pages("DELETE", source):
            yield int(page["deleted"])

    def _pages(
        self,
        method: str,
        source: str | None,
        limit: int | None = None,
        seconds: float | None = None,
    ) -> Iterator[dict[str, Any]]:
        sources = [""] if source is None else _sources(source)
        # Swift without the filter would act on the account itself.
        if "cache" not in self._connection.require_hapi():
            raise ClientError(
                "no_hapi",
                "the hapi filter of this store has no feature cache; ask the "
                "operator for a newer release",
            )
        query = {"hapi-cache": ""}
        if limit is not None:
            query["limit"] = str(limit)
        deadline = None if seconds is None else time.monotonic() + seconds
        for source_name in sources:
            marker: str | None = ""
            while marker is not None:
                page = self._connection.account_request(
                    method,
                    {**query, "source": source_name, "marker": marker},
                    _seconds_until(deadline),
                )
                yield page
                marker = page["marker"]


def _seconds_until(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TooSlowError("too_slow", "the cache could not be listed in time")
    return left


def _sources(text: str) -> list[str]:
    """Returns the sources to query: the named object, and those below it."""
    container, _, name = text.removeprefix(SCHEME).partition("/")
    if not container or ":" in container or "\x00" in text:
        raise ClientError(
            "bad_configuration",
            f"{text!r} is not a source of cached features; write CONTAINER, "
            "CONTAINER/OBJECT or CONTAINER/PREFIX, with or without swift://",
        )
    if not name:
        return [container]
    if name.endswith("/"):
        return [f"{container}/{name}"]
    return [f"{container}/{name}", f"{container}/{name}/"]
