"""Lists a job's cached features at the start of an epoch."""

from __future__ import annotations

import logging
import os.path
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from hapi_client.planning.cache_tracker import CacheTracker, Entry
from hapi_client.swift.cache_admin import CacheAdminClient
from hapi_client.swift.connection import Connection
from hapi_client.swift.transport import CancelScope
from hapi_protocol.data_index import Span
from hapi_protocol.errors import HapiError

logger = logging.getLogger(__name__)

# Chosen: at a second a page, 100,000 entries.  The first plan waits for it;
# later listings run while an epoch loads, and each page counts at once.
LISTING_SECONDS = 10.0
"""Deadline of one listing with all its pages."""
PAGE_ENTRIES = 10_000
"""Entries of one page: Swift's limit (``container_listing_limit``)."""


class CacheListing:
    """Updates a tracker from the store's listing of the cache.

    A listing that fails changes nothing, and is logged once.

    Args:
        connection: connection to the account.
        splits: spans of each split of the data.
        tracker: tracker of the job.
    """

    def __init__(
        self,
        connection: Connection,
        splits: Iterable[Sequence[Span]],
        tracker: CacheTracker,
    ) -> None:
        self._connection = connection
        self._sources = sorted(
            {source for spans in splits for source in _sources(spans)}
        )
        self._tracker = tracker
        self._is_refused = False
        self._has_warned = False
        self._thread: threading.Thread | None = None

    def start(self, scope: CancelScope) -> None:
        """Reads the listing in a thread, unless a thread is doing so.

        Args:
            scope: cancels the requests.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(
            target=self._read_for,
            args=(scope,),
            name="hapi-cache",
            daemon=True,
        )
        self._thread.start()

    def _read_for(self, scope: CancelScope) -> None:
        with self._connection.working_for(scope):
            self.read()

    def read(self) -> None:
        """Reads the listing within :data:`LISTING_SECONDS`."""
        if self._is_refused or not self._tracker.is_active:
            return
        started = time.monotonic()
        try:
            self._tracker.replace(self._read(started), started)
        except HapiError as error:
            if error.status in (401, 403):
                self._is_refused = True
                self._tracker.deny_storing()
                logger.info(
                    "this user may not list the cache of %s: its cached "
                    "features are used after a response has reported them",
                    ", ".join(self._sources),
                )
            elif not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "cannot list the cached features of %s: %s",
                    ", ".join(self._sources),
                    error,
                )

    def _read(self, started: float) -> set[Entry]:
        """Returns all entries, and adds each page to the tracker at once."""
        cache = CacheAdminClient(self._connection)
        listed: set[Entry] = set()
        for source in self._sources:
            left = LISTING_SECONDS - (time.monotonic() - started)
            for page in cache.pages(source, limit=PAGE_ENTRIES, seconds=left):
                entries = {(entry.source, entry.key) for entry in page.entries}
                self._tracker.add(entries)
                listed |= entries
        return listed


def _sources(spans: Sequence[Span]) -> Iterator[str]:
    """Yields the deepest folder of each container that holds all its shards.

    Only the owner of another account may list its cache.  Object names are no
    file paths: ``a//b`` is not ``a/b``.
    """
    for container in {span.container for span in spans}:
        if container.startswith("/"):
            continue
        common = os.path.commonprefix(  # noqa: RUF071
            [span.shard for span in spans if span.container == container]
        )
        folder = common.rpartition("/")[0]
        yield f"{container}/{folder}/" if folder else container
