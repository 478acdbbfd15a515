"""Entries of ``clouds.yaml``, read by openstacksdk.

``OS_CLIENT_CONFIG_FILE`` comes first, then the current folder,
``~/.config/openstack`` and ``/etc/openstack``.  A ``secure.yaml`` next to the
file (or ``OS_CLIENT_SECURE_FILE``) is merged in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keystoneauth1.exceptions import ClientException

from hapi_protocol.errors import ClientError


@dataclass(frozen=True)
class CloudEntry:
    """The parts of a ``clouds.yaml`` entry that the client uses.

    Attributes:
        path: file that contains the entry.
        auth_type: keystoneauth1's name of the plugin.
        auth: the plugin's options.
        fields: all other fields, such as ``region_name`` and ``verify``.
        endpoint: object-store URL to use instead of the catalogue's.
    """

    path: str
    auth_type: str
    auth: Mapping[str, Any]
    fields: Mapping[str, Any]
    endpoint: str | None


def find_cloud(
    name: str, environ: Mapping[str, str], region_name: str | None
) -> CloudEntry:
    """Finds the entry of a cloud.

    Args:
        name: name of the cloud.
        environ: environment variables, for the paths of the files.
        region_name: one of the entry's ``regions``, if it has several.

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
        found = config.get_one(cloud=name, region_name=region_name)
    except (exceptions.ConfigException, ClientException) as error:
        raise ClientError(
            "bad_configuration", f"cloud {name!r}: {error}"
        ) from error
    return CloudEntry(
        path=str(config.config_filename),
        auth_type=found.config["auth_type"],
        auth=dict(found.config["auth"]),
        fields=found.config,
        endpoint=found.get_endpoint("object-store"),
    )


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
