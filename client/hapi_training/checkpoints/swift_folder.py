"""Checkpoints in Swift: static large objects that all ranks upload.

``<prefix>/step-000000000012.pt`` is the file itself, byte for byte: a
manifest, written when all segments are there, so that it is never half
uploaded.  ``<prefix>/latest`` is written last and names it.  Segments are in
``<container>_segments/<prefix>/<step>/<attempt>/``.  They have no
``X-Delete-After``: after that time the whole object would be damaged.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from hapi_client.swift.connection import Connection
from hapi_client.swift.retry import is_outage
from hapi_client.swift.swift_url import Location
from hapi_protocol.errors import (
    ClientError,
    HapiError,
    NotFoundError,
    SourceChangedError,
)
from hapi_training.checkpoints.folder import FILE_NAME, VERSION, file_name
from hapi_training.checkpoints.segments import (
    Read,
    Segment,
    in_parallel,
    put_manifest,
    put_segment,
    read_range,
    segment_bytes,
    segments_of,
)

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
_NEW = {"If-None-Match": "*"}
T = TypeVar("T")


@dataclass(frozen=True)
class Pointer:
    """The checkpoint that ``latest`` names.

    Attributes:
        step: step of the newest whole checkpoint.
        name: name of its object.
        size: its length, in bytes.
        etag: its ETag, without quotes.
    """

    step: int
    name: str
    size: int
    etag: str


class SwiftFolder:
    """A prefix of a container with the checkpoints of one run.

    Args:
        connection: connection to the account.
        location: container and prefix.
        patience_seconds: time without a new segment of other ranks, after
            which the first rank uploads those that are missing.
        is_shared: True if another rank may become the first one.

    Attributes:
        location: as given.
        known: what ``latest`` named last, as far as this process knows.
    """

    def __init__(
        self,
        connection: Connection,
        location: Location,
        patience_seconds: float = 30.0,
        *,
        is_shared: bool = False,
    ) -> None:
        self._connection = connection
        self.location = location
        self._container = location.container
        self._segments = segments_of(location.container)
        self._patience, self._is_shared = patience_seconds, is_shared
        self._is_open = False
        self.known: Pointer | None = None

    def claim(self, run: str) -> None:
        """Notes that the prefix belongs to a run.

        Raises:
            ClientError: ``bad_state`` if it belongs to another one.
        """
        if self._is_open:
            return
        for container in (self._container, self._segments):
            self._connection.put_container(container)
        facts = json.dumps({"version": VERSION, "run": run}).encode()
        try:
            self._put("run.json", facts, headers=_NEW)
        except SourceChangedError as error:
            owner = self.run()
            if owner != run:
                raise ClientError(
                    "bad_state",
                    f"{self.location} belongs to another run, {owner}; "
                    "restore its newest checkpoint to go on with it, or give "
                    "another prefix as remote=",
                ) from error
        self._is_open = True

    def run(self) -> str | None:
        """Returns the run that the prefix belongs to; None if to none.

        Raises:
            ClientError: ``bad_state`` for one of another version.
        """
        try:
            facts = json.loads(self._read("run.json"))
            if facts["version"] == VERSION:
                return str(facts["run"])
            reason = f"its version is {facts['version']!r}"
        except NotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
        raise ClientError(
            "bad_state",
            f"{self.location}/run.json is not of version {VERSION} "
            f"({reason}); delete it if it is damaged, or give another prefix "
            "as remote=",
        )

    def pointer(self) -> Pointer | None:
        """Returns what ``latest`` names; None without it.

        Raises:
            ClientError: ``bad_state`` if it is no pointer.
        """
        try:
            facts = json.loads(self._read("latest"))
            sizes = {name: int(facts[name]) for name in ("step", "size")}
            return Pointer(**{**facts, **sizes})
        except NotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ClientError(
                "bad_state",
                f"{self.location}/latest is no pointer to a checkpoint: "
                f"{error}; delete it, or give another prefix",
            ) from error

    def steps(self) -> list[int]:
        """Steps of which there is a checkpoint, the newest first."""
        prefix = self.location.object_name("")
        try:
            names = [
                FILE_NAME.fullmatch(info.name[len(prefix) :])
                for info in self._connection.list(self._container, prefix)
            ]
        except NotFoundError:
            return []
        steps = {int(name[1]) for name in names if name}
        # Listings lag behind.
        pointer = self.known or self.pointer()
        return sorted(steps | ({pointer.step} if pointer else set()))[::-1]

    def upload(
        self,
        step: int,
        attempt: str,
        size: int,
        read: Read,
        rank: int,
        num_ranks: int,
    ) -> dict[int, Segment]:
        """Uploads this rank's segments of a checkpoint.

        Args:
            step: step of the checkpoint.
            attempt: text that is equal for all ranks, and for no other
                upload.
            size: length of the file, in bytes.
            read: reads the file.
            rank: this rank.
            num_ranks: ranks that upload.

        Returns:
            The segments, by their numbers.

        Raises:
            HapiError: of Swift.
        """
        numbers = range(rank, _num_segments(size), num_ranks)
        segments = in_parallel(
            lambda number: self._send(step, attempt, size, read, number),
            numbers,
        )
        return dict(zip(numbers, segments, strict=True))

    def _send(
        self, step: int, attempt: str, size: int, read: Read, number: int
    ) -> Segment:
        length = segment_bytes(size)
        start = number * length
        return put_segment(
            self._connection,
            self._segments,
            self._segment_name(step, attempt, number),
            read,
            start,
            min(length, size - start),
        )

    def commit(
        self,
        step: int,
        attempt: str,
        size: int,
        read: Read,
        has_ended: Callable[[], bool],
        sent: Mapping[int, Segment],
    ) -> None:
        """Makes the checkpoint, when all segments are there; then names it.

        Args:
            step: as for :meth:`upload`, and so are the others.
            attempt: see there.
            size: see there.
            read: see there; segments of a rank that is lost are read, too.
            has_ended: returns True if other ranks upload nothing any more.
            sent: what :meth:`upload` has returned.

        Raises:
            ClientError: ``bad_state`` if another process writes there, too.
            HapiError: of Swift.
        """
        segments = []
        for number in range(_num_segments(size)):
            name = self._segment_name(step, attempt, number)
            began = time.monotonic()
            while (segment := sent.get(number) or self._segment(name)) is None:
                waited = time.monotonic() - began
                if waited > self._patience or has_ended():
                    logger.info("uploading %s of another rank, too", name)
                    self._send(step, attempt, size, read, number)
                else:
                    time.sleep(POLL_SECONDS)
            segments.append(segment)
        etags = "".join(segment.etag for segment in segments)
        etag = hashlib.md5(etags.encode(), usedforsecurity=False).hexdigest()
        latest = self.pointer()
        if latest is not None and latest != self.known and not self._is_shared:
            raise ClientError(
                "bad_state",
                f"another process has written a checkpoint to {self.location}"
                f" (latest names that of step {latest.step}); end one of "
                "them, or give another prefix as remote=",
            )
        name = file_name(step)
        place = self._connection, self._container, self._name(name)
        mine = {segment.name for segment in segments}
        garbage: set[str] = set()
        try:
            put_manifest(*place, segments, _NEW)
        except SourceChangedError:
            # Of before a restore from an earlier step, or this very one: the
            # answer to the first request may be lost.
            others = set(self._segments_of(name))
            info = self._connection.head(self._container, self._name(name))
            if info is not None and info.etag == etag:
                garbage = mine - others
            else:
                put_manifest(*place, segments)
                garbage = others - mine
        self.known = Pointer(step, name, size, etag)
        self._put("latest", json.dumps(asdict(self.known)).encode())
        for other in garbage:
            self._delete_segment(other)

    def prune(self, step: int, keep: int, superseded: Sequence[int]) -> None:
        """Deletes old checkpoints, and segments that belong to none.

        Args:
            step: step of the newest checkpoint.
            keep: number of checkpoints that are kept.
            superseded: later steps of what the run was before a restore.
        """
        steps = self.steps()
        kept = [other for other in steps if other <= step][:keep]
        for other in steps:
            if (other < step and other not in kept) or (
                other > step and other in superseded
            ):
                self.remove(other)

    def remove(self, step: int) -> None:
        """Deletes a checkpoint and its segments."""
        name = file_name(step)
        query = {"multipart-manifest": "delete"}
        try:
            self._connection.delete(
                self._container,
                self._name(name),
                # An object of others is no manifest.
                query=query if self._segments_of(name) else None,
            )
        except NotFoundError:
            logger.info("%s is deleted already", file_name(step))

    def collect(self, before: int) -> None:
        """Deletes segments of earlier steps that no checkpoint has.

        A run that was killed has left them.
        """
        used = {
            name
            for step in self.steps()
            for name in self._segments_of(file_name(step))
        }
        prefix = self.location.object_name("")
        for info in self._connection.list(self._segments, prefix):
            step = info.name[len(prefix) :].partition("/")[0]
            is_ours = step.isdecimal() and int(step) < before
            if is_ours and info.name not in used:
                self._delete_segment(info.name)

    def version(self, step: int) -> tuple[str, int]:
        """Returns the ETag and the length of a checkpoint.

        Raises:
            NotFoundError: there is none.
        """
        name = self._name(file_name(step))
        info = self._connection.head(self._container, name)
        if info is None:
            raise NotFoundError("not_found", f"{self._container}/{name}")
        return info.etag, info.length_bytes

    def size(self, step: int) -> int:
        """Length of a checkpoint, in bytes."""
        return self.version(step)[1]

    def whole(self, step: int) -> bytes:
        """Reads a checkpoint."""
        etag, size = self.version(step)
        return self.read(step, etag, 0, size)

    def read(self, step: int, etag: str, start: int, stop: int) -> bytes:
        """Reads bytes of one version of a checkpoint."""
        name = self._name(file_name(step))
        return read_range(
            self._connection, self._container, name, etag, start, stop
        )

    def _segments_of(self, name: str) -> list[str]:
        """Names of the segments of a checkpoint; none if it is missing."""
        query = {"multipart-manifest": "get", "format": "raw"}
        start = len(f"/{self._segments}/")
        try:
            entries = json.loads(self._read(name, query=query))
            return [entry["path"][start:] for entry in entries]
        except NotFoundError:
            return []
        except (ValueError, KeyError, TypeError):
            logger.warning("%s of %s is no checkpoint", name, self.location)
            return []

    def _segment(self, name: str) -> Segment | None:
        info = self._connection.head(self._segments, name)
        return (
            None
            if info is None
            else Segment(name, info.etag, info.length_bytes)
        )

    def _segment_name(self, step: int, attempt: str, number: int) -> str:
        return self._name(f"{step:012}/{attempt}/{number:06}")

    def _delete_segment(self, name: str) -> None:
        try:
            self._connection.delete(self._segments, name)
        except NotFoundError:
            logger.info("%s is deleted already", name)

    def _name(self, name: str) -> str:
        return self.location.object_name(name)

    def _read(self, name: str, **options: Any) -> bytes:
        # Replicas may be old.
        headers = {"X-Newest": "true"}
        return self._connection.get_object(
            self._container, self._name(name), headers=headers, **options
        )

    def _put(self, name: str, data: bytes, **options: Any) -> None:
        self._connection.put(
            self._container,
            self._name(name),
            io.BytesIO(data),
            len(data),
            content_type="application/json",
            **options,
        )


def readable(step: int, read: Callable[[], T]) -> T:
    """Reads something of a checkpoint.

    Raises:
        ClientError: ``bad_state`` if it, or a part of it, is missing or
            damaged.
        HapiError: of a Swift that is away.
    """
    try:
        return read()
    except HapiError as error:
        if is_outage(error):
            raise
        raise ClientError(
            "bad_state", f"step {step}: {error.message.partition(';')[0]}"
        ) from error


def _num_segments(size: int) -> int:
    return -(-size // segment_bytes(size))
