"""Checks of a data set: its index, its shards and the right to read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hapi_client.data.catalog import IndexDifference
from hapi_client.data.index import load_index
from hapi_client.data.listing import list_data
from hapi_client.data.span_bytes import read_span
from hapi_client.doctor.check_runner import (
    FAILURE,
    SKIPPED,
    WARNING,
    Finding,
    check,
)
from hapi_client.swift.account import ObjectInfo
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import DataIndex
from hapi_protocol.errors import HapiError
from hapi_splitter.units import count_text

MAX_NAMED = 3
_NO_RIGHT_TO_READ = "ask its owner for the right to read (X-Container-Read)"
_LIST_CONTAINERS = "check the name: 'hapi ls' lists the containers"
_MORE_TIME = "allow more time with --timeout"
_INDEX_AGAIN = "hapi index {self.location}"


class DataSetChecks:
    """The checks of one data set.

    Args:
        get_connection: returns the connection of the earlier checks.
        location: location of the data set.
        get_max_object_bytes: returns the filter's limit of an object, if
            known.
    """

    def __init__(
        self,
        get_connection: Callable[[], Connection],
        location: Location,
        get_max_object_bytes: Callable[[], int | None],
    ) -> None:
        self._get_connection = get_connection
        self.location = location
        self._get_max_object_bytes = get_max_object_bytes
        self._data_index: DataIndex | None = None
        self._shards: Sequence[ObjectInfo] | None = None

    @check(
        "account",
        remedies={
            "bad_index": f"{_INDEX_AGAIN}, or 'hapi upload' for new data",
            401: _NO_RIGHT_TO_READ,
            403: _NO_RIGHT_TO_READ,
            404: _LIST_CONTAINERS,
            "too_slow": _MORE_TIME,
        },
    )
    def _index(self) -> str:
        index = self._data_index = load_index(
            self._get_connection(), self.location
        )
        shards = count_text(len(index.shards), "shard")
        return f"{count_text(len(index), 'sample')} in {shards}"

    @check("index", remedies={403: _NO_RIGHT_TO_READ, "": _INDEX_AGAIN})
    def _read(self) -> str:
        """Reads a byte of the first shard of the index."""
        assert self._data_index is not None, "index comes first"
        span = self._data_index.spans(container=self.location.container)[0]
        read_span(self._get_connection(), span.part(0, 1), max_bytes=1)
        return f"{span.shard} can be read"

    @check(
        "account",
        remedies={404: _LIST_CONTAINERS, "too_slow": _MORE_TIME},
    )
    def _list(self) -> Finding | str:
        try:
            shards = list_data(self._get_connection(), self.location).shards
        except HapiError as error:
            if error.status not in (401, 403):
                raise
            return Finding(
                WARNING,
                f"{self.location} may not be listed",
                "training needs no listing; for 'hapi ls' and 'hapi index', "
                "its owner adds .rlistings to X-Container-Read",
                error.trans_id,
            )
        self._shards = shards
        limit = self._get_max_object_bytes()
        large = [s.name for s in shards if limit and s.length_bytes > limit]
        if large:
            return Finding(
                WARNING,
                f"{_some_of(large)} of {len(shards)} shards are larger than "
                f"the filter's max_object_bytes, {limit}",
                "store smaller shards; 'hapi index' cannot read these",
            )
        return count_text(len(shards), "shard")

    @check("index", "list")
    def _etags(self) -> Finding | str:
        assert self._data_index is not None, "index comes first"
        if self._shards is None:
            return Finding(SKIPPED, "not checked, because it needs a listing")
        difference = IndexDifference.between(
            self._data_index,
            {shard.name: shard.etag for shard in self._shards},
        )
        if not difference.is_stale:
            return "the ETags of the index match those of the shards"
        parts = (
            (difference.changed, "changed since it was written"),
            (difference.missing, "missing"),
            (difference.added, "not in it"),
        )
        return Finding(
            FAILURE if difference.changed or difference.missing else WARNING,
            "the index is stale: "
            + "; ".join(f"{label}: {_some_of(n)}" for n, label in parts if n),
            f"hapi index {self.location}",
        )


def _some_of(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    first = ", ".join(names[:MAX_NAMED])
    return f"{first} and {more} more" if more > 0 else first
