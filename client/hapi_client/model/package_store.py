"""Store of model packages, which are named by their digest."""

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
from hapi_client.swift.capabilities import model_library
from hapi_client.swift.connection import Connection
from hapi_protocol.errors import (
    ClientError,
    HapiError,
    NotFoundError,
    PackageError,
    RightsError,
    SourceChangedError,
)
from hapi_protocol.headers import ByteRange, ModelPath
from hapi_splitter.package.header import header_bytes
from hapi_splitter.package.metadata import PackageMetadata

logger = logging.getLogger(__name__)

DEFAULT_MODELS_CONTAINER = "hapi-models"
USUAL_HEADER_BYTES = 64 * 1024
"""Bytes of the first read: ResNet-50's header has 35 KB; longer ones (ViT-L:
105 KB) take a second read."""
NUM_THREADS = 8
LIBRARY_SECONDS = 10.0
"""Deadline of a look-up in the model library."""
_NAME = re.compile(r"([0-9a-f]{64})\.hapi")


def package_name(digest: str) -> str:
    """Returns the object name of a package; ``digest`` is 64 hex digits."""
    return f"{digest}.hapi"


@dataclass(frozen=True)
class StoredPackage:
    """A package as the listing of its container describes it.

    Attributes:
        digest: sha256 of the package, in hex.
        info: its object.
    """

    digest: str
    info: ObjectInfo

    @property
    def stored(self) -> datetime:
        """Time of storage (UTC)."""
        stored = datetime.fromisoformat(self.info.stored)
        return stored.replace(tzinfo=timezone.utc)


def list_packages(
    connection: Connection, container: str
) -> list[StoredPackage]:
    """Lists the packages of a container, the newest first.

    Raises:
        HapiError: if the container does not exist, or may not be listed.
    """
    packages = [
        StoredPackage(match.group(1), info)
        for info in connection.list(container)
        if (match := _NAME.fullmatch(info.name))
    ]
    return sorted(
        packages, key=lambda package: package.info.stored, reverse=True
    )


def read_all_metadata(
    connection: Connection, container: str, packages: Sequence[StoredPackage]
) -> Iterator[PackageMetadata | PackageError | RightsError]:
    """Reads the metadata of packages, in the given order.

    Only the header of each package is read.

    Yields:
        The metadata, or the error that prevents reading them.
    """

    def read(
        package: StoredPackage,
    ) -> PackageMetadata | PackageError | RightsError:
        try:
            return read_metadata(connection, container, package.info)
        except (PackageError, RightsError) as error:
            return error
        except SourceChangedError as error:
            return NotFoundError(
                "not_found",
                "it was replaced or deleted",
                object_name=error.object_name,
                trans_id=error.trans_id,
            )

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        yield from pool.map(read, packages)


def read_metadata(
    connection: Connection, container: str, info: ObjectInfo
) -> PackageMetadata:
    """Reads the metadata of a package from its header.

    Raises:
        PackageError: if it is not a package.
        HapiError: if it cannot be read, or is replaced meanwhile.
    """

    def read(length_bytes: int) -> bytes:
        stop = min(length_bytes, info.length_bytes)
        if not stop:
            return b""
        span = ByteRange(0, stop - 1)
        return connection.get_range(
            container, info.name, span, if_match=info.etag
        )

    data = read(USUAL_HEADER_BYTES)
    length_bytes = header_bytes(data)
    if length_bytes > len(data):
        data = read(length_bytes)
    return PackageMetadata.from_bytes(data)


def select_packages(
    packages: Sequence[StoredPackage], prefixes: Sequence[str]
) -> list[StoredPackage]:
    """Returns the packages with the given prefixes of digests, each once.

    Raises:
        ClientError: ``bad_configuration`` naming every unknown or ambiguous
            prefix.
    """
    selected: dict[str, StoredPackage] = {}
    problems = []
    for prefix in prefixes:
        matches = [
            package
            for package in packages
            if package.digest.startswith(prefix.lower())
        ]
        if len(matches) == 1:
            selected[matches[0].digest] = matches[0]
        elif matches:
            names = ", ".join(package.digest[:16] for package in matches)
            problems.append(f"{prefix!r} is ambiguous: {names}")
        else:
            problems.append(f"there is no package {prefix!r}")
    if problems:
        raise ClientError("bad_configuration", "; ".join(problems))
    return list(selected.values())


def older_than(
    packages: Sequence[StoredPackage], age: timedelta, now: datetime
) -> list[StoredPackage]:
    """Returns the packages stored longer ago than ``age``."""
    return [package for package in packages if now - package.stored > age]


def delete_package(
    connection: Connection, container: str, package: StoredPackage
) -> bool:
    """Deletes a package; returns False if it did not exist."""
    try:
        connection.delete(container, package.info.name)
    except NotFoundError:
        return False
    return True


def find_package(
    connection: Connection,
    container: str,
    digest: str,
    md5: Callable[[], str],
) -> ModelPath | None:
    """Finds a package in one's own container, else in the model library.

    An object with other bytes under the package's name is not the package:
    its ETag is not their MD5.  Nor is a large object, which the filter
    refuses.  Any failure of the library is logged and counts as not found.

    Args:
        connection: connection to one's own account.
        container: container of packages there.
        digest: sha256 of the package in hex, which names the object.
        md5: returns the MD5 of the package in hex; called at most twice, and
            only if there is an object of that name.

    Returns:
        The path of the package; None if it is in neither.

    Raises:
        HapiError: if one's own container cannot be read.
    """
    name = package_name(digest)
    stored = connection.head(container, name)
    if stored is not None and stored.etag == md5():
        logger.info("package %s/%s is already stored", container, name)
        return connection.model_path(container, name)
    try:
        library = model_library(connection.require_hapi(any_version=True))
        if library is None:
            return None
        account, shared = library
        stored = connection.head(
            shared, name, account=account, seconds=LIBRARY_SECONDS
        )
    except HapiError as error:
        logger.info("the model library cannot be read: %s", error)
        return None
    if stored is None or stored.etag != md5():
        return None
    logger.info("package %s is in the model library", name)
    return ModelPath(account, shared, name)


def upload_package(
    connection: Connection,
    container: str,
    path: Path,
    digest: str,
    progress: Callable[[BinaryIO, str, int], BinaryIO] | None = None,
) -> tuple[ModelPath, int]:
    """Stores a package, in place of any object of its name.

    Args:
        connection: connection to the account that will own it.
        container: container of packages, created if necessary.
        path: path of the package file.
        digest: sha256 of the package in hex, which names the object.
        progress: wraps (file, description, bytes) to show progress.

    Returns:
        The path of the package, and the number of bytes sent.
    """
    name = package_name(digest)
    length_bytes = path.stat().st_size
    connection.put_container(container)
    with path.open("rb") as file:
        source = (
            progress(file, "model package", length_bytes) if progress else file
        )
        connection.put(container, name, source, length_bytes)
    logger.info(
        "stored package %s/%s, %d bytes", container, name, length_bytes
    )
    return connection.model_path(container, name), length_bytes
