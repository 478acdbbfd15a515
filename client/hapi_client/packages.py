"""Model packages in the store: named by their digest, uploaded once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from hapi_client.connection import Connection
from hapi_protocol.headers import ModelPath

logger = logging.getLogger(__name__)

DEFAULT_MODELS_CONTAINER = "hapi-models"


def package_name(digest: str) -> str:
    """Object name of a package; ``digest`` is 64 hex digits."""
    return f"{digest}.hapi"


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
