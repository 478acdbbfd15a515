"""Whether a data set can be trained on: its index, and who may read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hapi_client.data.catalog import IndexDifference
from hapi_client.data.index import list_shards, load_index
from hapi_client.doctor.checks import FAILURE, SKIPPED, WARNING, Check, Finding
from hapi_client.swift.account import ObjectInfo
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import DataIndex
from hapi_protocol.errors import HapiError
from hapi_protocol.headers import ByteRange

MAX_NAMED = 3
_NO_RIGHT_TO_READ = "ask its owner for the right to read (X-Container-Read)"
_LIST_CONTAINERS = "look at the name: 'hapi ls' lists the containers"
_MORE_TIME = "give it more time by --timeout"


class DataSetChecks:
    """Of one data set.

    Args:
        find_connection: once there is one.
        location: of the data set.
        most_bytes: that the filter takes of an object, once it is known.
    """

    def __init__(
        self,
        find_connection: Callable[[], Connection],
        location: Location,
        most_bytes: Callable[[], int | None],
    ) -> None:
        self._find_connection = find_connection
        self._location = location
        self._most_bytes = most_bytes
        self._index: DataIndex | None = None
        self._shards: list[ObjectInfo] | None = None

    def checks(self) -> list[Check]:
        """In their order."""
        again = f"hapi index {self._location}"
        return [
            Check(
                "index",
                self._load_index,
                ("account",),
                {
                    "bad_index": again,
                    401: _NO_RIGHT_TO_READ,
                    403: _NO_RIGHT_TO_READ,
                    404: _LIST_CONTAINERS,
                    "too_slow": _MORE_TIME,
                },
            ),
            Check(
                "read",
                self._read_a_byte,
                ("index",),
                {403: _NO_RIGHT_TO_READ, "": again},
            ),
            Check(
                "list",
                self._list_shards,
                ("account",),
                {404: _LIST_CONTAINERS, "too_slow": _MORE_TIME},
            ),
            Check("etags", self._compare_etags, ("index", "list")),
        ]

    def _load_index(self) -> str:
        index = self._index = load_index(
            self._find_connection(), self._location
        )
        return f"{len(index)} samples in {len(index.shards)} shards"

    def _read_a_byte(self) -> str:
        """Of the first shard, as the index has it."""
        assert self._index is not None, "index comes first"
        shard = self._index.shards[0]
        self._find_connection().get_range(
            self._location.container,
            shard.name,
            ByteRange(0, 0),
            if_match=shard.etag,
        )
        return f"{shard.name} can be read"

    def _list_shards(self) -> Finding | str:
        try:
            found = list_shards(self._find_connection(), self._location)
        except HapiError as error:
            if error.status not in (401, 403):
                raise
            return Finding(
                WARNING,
                f"{self._location} may not be listed",
                "training needs no listing; for 'hapi ls' and 'hapi index' "
                "its owner adds .rlistings to X-Container-Read",
                error.trans_id,
            )
        self._shards = found
        most = self._most_bytes()
        large = [e.name for e in found if most and e.length_bytes > most]
        if large:
            return Finding(
                WARNING,
                f"{_named(large)} of {len(found)} shards: over the filter's "
                f"max_object_bytes, {most}",
                "store smaller shards; 'hapi index' cannot read these",
            )
        return f"{len(found)} shards"

    def _compare_etags(self) -> Finding | str:
        assert self._index is not None, "index comes first"
        if self._shards is None:
            return Finding(SKIPPED, "not looked at without a listing")
        found = IndexDifference.between(
            self._index, {each.name: each.etag for each in self._shards}
        )
        if not found.is_stale:
            return "those of the index are those of the shards"
        parts = (
            (found.changed, "changed since it was written"),
            (found.missing, "gone"),
            (found.added, "not in it"),
        )
        return Finding(
            FAILURE if found.changed or found.missing else WARNING,
            "the index is stale: "
            + "; ".join(f"{what}: {_named(n)}" for n, what in parts if n),
            f"hapi index {self._location}",
        )


def _named(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    first = ", ".join(names[:MAX_NAMED])
    return f"{first} and {more} more" if more > 0 else first
