"""Transfer jobs made of flat options, and what they need on Swift."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hapi_client import (
    CacheConfig,
    Connection,
    Credentials,
    JobConfig,
    PlanConfig,
    ReadConfig,
    TransferJob,
)
from hapi_client.data.upload import upload
from hapi_client.model.package_store import upload_package
from hapi_client.progress import SilentReporter
from hapi_client.swift.swift_url import Location
from hapi_cluster import Cluster
from hapi_protocol.headers import ModelPath
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.package.writer import write_package
from networks import small_network, small_transform


def connected(cluster: Cluster, **changes: Any) -> Connection:
    """A connection of the cluster's user, unless another is given."""
    login = {
        "auth_url": cluster.auth_url,
        "user": cluster.user,
        "key": cluster.key,
    }
    return Connection(Credentials.v1(**{**login, **changes}))


CONFIGS = {"plan": PlanConfig, "read": ReadConfig, "cache": CacheConfig}


def transfer_job(model: Any, **options: Any) -> TransferJob:
    """Makes a job; each option goes to the config that has a field for it.

    Args:
        options: arguments of :class:`TransferJob`, and fields of its configs;
            a whole config, ``read=ReadConfig(…)``, is the base of its fields.
    """
    config = {}
    for name, kind in CONFIGS.items():
        own = {field.name for field in fields(kind)} & set(options)
        given = {field: options.pop(field) for field in own}
        config[name] = replace(options.pop(name, None) or kind(), **given)
    for field in fields(JobConfig):
        if field.name in options:
            config[field.name] = options.pop(field.name)
    return TransferJob(model, config=JobConfig(**config), **options)


def small_job(data: Any, **options: Any) -> TransferJob:
    """Makes a job of the small image network, unless another is given."""
    # Most tests look at requests, of later epochs too.
    options.setdefault("memory_bytes", 0)
    return transfer_job(
        options.pop("network", None) or small_network(),
        data=data if isinstance(data, (dict, list)) else str(data),
        **{
            "freeze": "body",
            "transform": small_transform(),
            **options,
        },
    )


def upload_shards(
    connection: Connection,
    place: Location,
    shards: Mapping[str, bytes],
    folder: Path | None = None,
) -> Location:
    """Writes shards to a folder, and uploads all that is there.

    Args:
        folder: a temporary one, if none is given.
    """
    with tempfile.TemporaryDirectory() as temporary:
        path = folder or Path(temporary)
        for name, data in shards.items():
            (path / name).write_bytes(data)
        upload(connection, place, [path], SilentReporter())
    return place


def store_package(
    connection: Connection,
    folder: Path,
    frozen: FrozenGraph,
    container: str = "models",
) -> ModelPath:
    info = write_package(frozen, folder / "model.hapi")
    return upload_package(connection, container, info.path, info.digest)[0]
