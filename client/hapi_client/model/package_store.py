"""Model packages in the store: named by their digest, uploaded once."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import BinaryIO

from hapi_client.swift.account import ObjectInfo
from hapi_client.swift.connection import Connection
from hapi_protocol.errors import (
    ClientError,
    PackageError,
    RightsError,
    SourceChangedError,
)
from hapi_protocol.headers import ByteRange, ModelPath
from hapi_splitter.package.inspection import (
    PackageDetails,
    PackageHead,
    Read,
    head_bytes,
)

logger = logging.getLogger(__name__)

DEFAULT_MODELS_CONTAINER = "hapi-models"
USUAL_HEAD_BYTES = 64 * 1024
READERS = 8
_NAME = re.compile(r"([0-9a-f]{64})\.hapi")


def package_name(digest: str) -> str:
    """Object name of a package; ``digest`` is 64 hex digits."""
    return f"{digest}.hapi"


@dataclass(frozen=True)
class StoredPackage:
    """A package in the store, as its container's listing has it.

    Attributes:
        digest: its sha256, in hex.
        info: of the object.
    """

    digest: str
    info: ObjectInfo

    @property
    def stored(self) -> datetime:
        """When."""
        found = datetime.fromisoformat(self.info.stored)
        return found.replace(tzinfo=timezone.utc)


def list_packages(
    connection: Connection, container: str
) -> list[StoredPackage]:
    """The packages of a container, the latest first; other objects are none.

    Raises:
        HapiError: the container is not there, or may not be listed.
    """
    found = [
        StoredPackage(match.group(1), info)
        for info in connection.list(container)
        if (match := _NAME.fullmatch(info.name))
    ]
    return sorted(found, key=lambda each: each.info.stored, reverse=True)


def read_heads(
    connection: Connection, container: str, packages: Sequence[StoredPackage]
) -> Iterator[PackageHead | PackageError | RightsError]:
    """What the packages say of themselves, in their order.

    Only their first bytes are read.

    Yields:
        The head, or why there is none.
    """

    def read(
        package: StoredPackage,
    ) -> PackageHead | PackageError | RightsError:
        try:
            return _read_head(connection, container, package.info)
        except (PackageError, RightsError) as error:
            return error
        except SourceChangedError as error:
            return RightsError(
                "not_found",
                "it was stored anew, or is gone",
                object_name=error.object_name,
                trans_id=error.trans_id,
            )

    with ThreadPoolExecutor(READERS) as pool:
        yield from pool.map(read, packages)


def read_details(
    connection: Connection, container: str, info: ObjectInfo
) -> PackageDetails:
    """What is in a package, from a few of its bytes.

    Raises:
        PackageError: it is none.
        HapiError: it cannot be read, or was stored anew meanwhile.
    """
    read = _reader(connection, container, info)
    return PackageDetails.read(read, _first_bytes(read))


def _read_head(
    connection: Connection, container: str, info: ObjectInfo
) -> PackageHead:
    read = _reader(connection, container, info)
    return PackageHead.from_bytes(_first_bytes(read))


def _first_bytes(read: Read) -> bytes:
    """All of a package's head."""
    data = read(0, USUAL_HEAD_BYTES)
    length_bytes = head_bytes(data)
    return data if length_bytes <= len(data) else read(0, length_bytes)


def _reader(connection: Connection, container: str, info: ObjectInfo) -> Read:
    def read(position: int, length_bytes: int) -> bytes:
        stop = min(position + length_bytes, info.length_bytes)
        if stop <= position:
            return b""
        return connection.get_range(
            container,
            info.name,
            ByteRange(position, stop - 1),
            if_match=info.etag,
        )

    return read


def select_packages(
    packages: Sequence[StoredPackage], prefixes: Sequence[str]
) -> list[StoredPackage]:
    """The packages whose digests begin so, each once.

    Raises:
        ClientError: ``bad_configuration`` naming every prefix that no
            package has, or several.
    """
    found: dict[str, StoredPackage] = {}
    problems = []
    for prefix in prefixes:
        matches = [
            each for each in packages if each.digest.startswith(prefix.lower())
        ]
        if len(matches) == 1:
            found[matches[0].digest] = matches[0]
        elif matches:
            names = ", ".join(each.digest[:16] for each in matches)
            problems.append(f"{prefix!r} may be any of {names}")
        else:
            problems.append(f"there is no package {prefix!r}")
    if problems:
        raise ClientError("bad_configuration", "; ".join(problems))
    return list(found.values())


def older_than(
    packages: Sequence[StoredPackage], age: timedelta, now: datetime
) -> list[StoredPackage]:
    """Those stored longer ago than ``age``."""
    return [each for each in packages if now - each.stored > age]


def delete_package(
    connection: Connection, container: str, package: StoredPackage
) -> bool:
    """Whether it was there still."""
    try:
        connection.delete(container, package.info.name)
    except RightsError as error:
        if error.status != 404:
            raise
        return False
    return True


def upload_package(
    connection: Connection,
    container: str,
    path: Path,
    digest: str,
    progress: Callable[[BinaryIO, str, int], BinaryIO] | None = None,
) -> tuple[ModelPath, int]:
    """Stores a package unless it is there.

    Args:
        connection: to the account that will own it.
        container: made if need be.
        path: of the package file.
        digest: its sha256, in hex; the object's name.
        progress: wraps (file, description, bytes) to show progress.

    Returns:
        Where it lies, and the bytes that had to be sent: 0 if it was
        there.
    """
    name = package_name(digest)
    model = connection.model_path(container, name)
    length_bytes = path.stat().st_size
    found = connection.head(container, name)
    if found is not None and found.length_bytes == length_bytes:
        logger.info("package %s/%s is there", container, name)
        return model, 0
    connection.put_container(container)
    with path.open("rb") as file:
        source = (
            progress(file, "model package", length_bytes) if progress else file
        )
        connection.put(container, name, source, length_bytes)
    logger.info(
        "stored package %s/%s, %d bytes", container, name, length_bytes
    )
    return model, length_bytes
