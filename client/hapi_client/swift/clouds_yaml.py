"""Entries of ``clouds.yaml``, as openstacksdk reads them.

The files are looked for in the present folder, ``~/.config/openstack`` and
``/etc/openstack``; ``OS_CLIENT_CONFIG_FILE`` comes first.  ``secure.yaml``
beside them is merged in (``OS_CLIENT_SECURE_FILE``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keystoneauth1.exceptions import ClientException

from hapi_protocol.errors import ClientError


@dataclass(frozen=True)
class CloudEntry:
    """What a cloud's entry says that concerns us.

    Attributes:
        path: file it stands in.
        auth_type: keystoneauth1's name of the plugin.
        auth: the plugin's options.
        fields: the others, as ``region_name``, ``cacert``, ``verify``.
        endpoint: URL of the object store in the place of the catalogue's.
    """

    path: str
    auth_type: str
    auth: Mapping[str, Any]
    fields: Mapping[str, Any]
    endpoint: str | None


def find_cloud(
    name: str, environ: Mapping[str, str], region_name: str | None
) -> CloudEntry:
    """The entry of a cloud.

    Args:
        name: of the cloud.
        environ: for the paths of files.
        region_name: of its ``regions``, where it has several.

    Raises:
        ClientError: ``bad_configuration``: there is none, it lacks
            something, or openstacksdk is not installed.
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
            "clouds.yaml (OS_CLOUD, --os-cloud) is read by openstacksdk, "
            "which is not here: pip install 'swift-hapi[clouds]'",
        ) from error
    return loader, exceptions


def _files(
    environ: Mapping[str, str], variable: str, usual: list[str]
) -> list[str]:
    first = environ.get(variable)
    return [first, *usual] if first else list(usual)
