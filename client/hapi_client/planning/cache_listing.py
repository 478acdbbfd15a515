"""Lists the store's cache for a job, at the start of an epoch."""

from __future__ import annotations

import logging
import os.path
import threading
import time
from collections.abc import Iterable, Sequence

from hapi_client.planning.cache_tracker import CacheTracker, Entry
from hapi_client.swift.cache_admin import CacheAdminClient
from hapi_client.swift.connection import Connection
from hapi_client.swift.transport import CancelScope
from hapi_protocol.data_index import Span
from hapi_protocol.errors import HapiError

logger = logging.getLogger(__name__)

LISTING_SECONDS = 10.0
"""Deadline of one listing, all its pages together."""
PAGE_ENTRIES = 10_000
"""Entries of one page, the most that Swift lists at once."""


class CacheListing:
    """Tells a tracker what is cached of a job's data.

    A listing that fails changes nothing: what it would have shown is not
    taken to be cached.  Failures are logged once.

    Args:
        connection: to the account.
        container: of the shards.
        splits: the spans of each split of the data.
        tracker: of the job.
    """

    def __init__(
        self,
        connection: Connection,
        container: str,
        splits: Iterable[Sequence[Span]],
        tracker: CacheTracker,
    ) -> None:
        self._connection = connection
        self._container = container
        self._sources = sorted(
            {_source(container, spans) for spans in splits if spans}
        )
        self._tracker = tracker
        self._is_refused = False
        self._has_warned = False
        self._thread: threading.Thread | None = None

    def start(self, scope: CancelScope) -> None:
        """Reads the listing in a thread, unless one is being read.

        Args:
            scope: of its requests.
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
        """Reads the listing, for :data:`LISTING_SECONDS` at most."""
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
                    "the cache is listed for its owner only: cached features "
                    "of %s are read once an answer has shown them",
                    self._container,
                )
            elif not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "cannot list the cached features of %s: %s",
                    self._container,
                    error,
                )

    def _read(self, started: float) -> set[Entry]:
        """All entries; each page is tracked as soon as it is here."""
        cache = CacheAdminClient(self._connection)
        found: set[Entry] = set()
        for source in self._sources:
            left = LISTING_SECONDS - (time.monotonic() - started)
            for page in cache.pages(source, limit=PAGE_ENTRIES, seconds=left):
                entries = {
                    (each.source.partition("/")[2], each.key)
                    for each in page.entries
                }
                self._tracker.add(entries)
                found |= entries
        return found


def _source(container: str, spans: Sequence[Span]) -> str:
    """The narrowest source that the cache lists with all shards below it."""
    # Names of objects are no paths: any two slashes count.
    common = os.path.commonprefix(  # noqa: RUF071
        [span.shard for span in spans]
    )
    folder = common.rpartition("/")[0]
    return f"{container}/{folder}/" if folder else container
