"""Entries of ``clouds.yaml``, read by openstacksdk.

``OS_CLIENT_CONFIG_FILE`` comes first, then the current folder,
``~/.config/openstack`` and ``/etc/openstack``.  A ``secure.yaml`` next to the
file (or ``OS_CLIENT_SECURE_FILE``) is merged in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keystoneauth1.exceptions import ClientException

from hapi_protocol.errors import ClientError


def find_cloud(
    name: str, environ: Mapping[str, str], region_name: str | None
) -> tuple[str, Any]:
    """Finds the entry of a cloud.

    Args:
        name: name of the cloud.
        environ: environment variables, for the paths of the files.
        region_name: one of the entry's ``regions``, if it has several.

    Returns:
        Path of its file, and openstacksdk's ``CloudRegion``.

    Raises:
        ClientError: ``bad_configuration`` if there is no such entry, it is
            incomplete, or openstacksdk is not installed.
    """
    loader, exceptions = _openstack()
    try:
        config = loader.OpenStackConfig(
            config_files=_files(
                environ, "OS_CLIENT_CONFIG_FILE", loader.CONFIG_FILES
            ),
            secure_files=_files(
                environ, "OS_CLIENT_SECURE_FILE", loader.SECURE_FILES
            ),
            load_envvars=False,
        )
        return (
            str(config.config_filename),
            config.get_one(cloud=name, region_name=region_name),
        )
    except (exceptions.ConfigException, ClientException) as error:
        raise ClientError(
            "bad_configuration", f"cloud {name!r}: {error}"
        ) from error


def _openstack() -> tuple[Any, Any]:
    try:
        from openstack import exceptions
        from openstack.config import loader
    except ImportError as error:
        raise ClientError(
            "bad_configuration",
            "clouds.yaml (OS_CLOUD, --os-cloud) needs openstacksdk, which is "
            "not installed: pip install 'swift-hapi[clouds]'",
        ) from error
    return loader, exceptions


def _files(
    environ: Mapping[str, str], variable: str, default_paths: list[str]
) -> list[str]:
    first = environ.get(variable)
    return [first, *default_paths] if first else list(default_paths)
