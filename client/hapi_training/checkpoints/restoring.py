"""The newest whole checkpoint of any rank, or in Swift."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from hapi_protocol.errors import ClientError
from hapi_training.checkpoints import ranks
from hapi_training.checkpoints.content import checked
from hapi_training.checkpoints.folder import Folder, naming
from hapi_training.checkpoints.swift_folder import SwiftFolder, readable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Newest:
    """The newest checkpoint that is whole.

    Attributes:
        content: its content.
        later_here: steps of later ones in this rank's folder.
        later_there: those in Swift, equal on all ranks.
    """

    content: dict[str, Any]
    later_here: list[int]
    later_there: list[int]


def newest_whole(folder: Folder, remote: SwiftFolder | None) -> Newest | None:
    """Reads the newest whole checkpoint, on all ranks.

    Args:
        folder: this rank's folder.
        remote: prefix in Swift.

    Returns:
        None if there is no checkpoint.

    Raises:
        ClientError: ``bad_state`` if none of those there are can be loaded.
        HapiError: of a Swift that is away.
    """
    found = ranks.together(lambda: _steps_of(folder))
    there = ranks.together(lambda: _steps_there(remote))[0]
    reasons: list[str] = []
    for step in sorted({*chain.from_iterable(found), *there}, reverse=True):
        owners = [rank for rank, steps in enumerate(found) if step in steps]
        content = None
        if owners:
            with _passing_over(reasons):
                content = _read(folder, step, owners[0])
        if content is None and remote is not None and step in there:
            with _passing_over(reasons):
                data = _downloaded(remote, step)
                content = checked(data, f"step {step} in Swift")
        if content is not None:
            mine = found[ranks.rank()]
            return Newest(
                content,
                [other for other in mine if other > step],
                [other for other in there if other > step],
            )
    if reasons:
        raise ClientError(
            "bad_state",
            f"no checkpoint can be loaded: {'; '.join(reasons)}; give another "
            "place, or delete them to start from the beginning",
        )
    return None


def _steps_of(folder: Folder) -> list[int]:
    with naming(folder.place):
        return folder.steps()


def _steps_there(remote: SwiftFolder | None) -> list[int]:
    if remote is None or ranks.rank():
        return []
    remote.known = remote.pointer()
    return remote.steps()


def _read(folder: Folder, step: int, owner: int) -> dict[str, Any]:
    """Returns a checkpoint of one rank on all of them."""
    is_mine = ranks.rank() == owner
    pieces = ranks.together(lambda: folder.whole(step) if is_mine else b"")
    return checked(pieces[owner], str(folder.file(step)))


def _downloaded(remote: SwiftFolder, step: int) -> bytes:
    """Reads a checkpoint in Swift by ranges that the ranks share.

    Raises:
        ClientError: ``bad_state``, on all ranks, if it is damaged.
        HapiError: of a Swift that is away.
    """
    rank, size = ranks.rank(), ranks.size()
    etag, length = ranks.together(
        lambda: readable(step, lambda: remote.version(step))
    )[0]
    part = -(-length // size)
    start = min(length, rank * part)
    stop = min(length, start + part)
    return b"".join(
        ranks.together(
            lambda: readable(
                step, lambda: remote.read(step, etag, start, stop)
            )
        )
    )


@contextmanager
def _passing_over(reasons: list[str]) -> Iterator[None]:
    """Goes on behind a damaged checkpoint; a lost rank is another thing."""
    try:
        yield
    except ClientError as error:
        if error.code != "bad_state":
            raise
        reasons.append(error.message)
        logger.warning("passing over a checkpoint: %s", error.message)
