"""Text of a cluster's configuration files.

Settings, ports and secrets in, ``{file name: text}`` out; no I/O.  Each start
rewrites the files; lasting changes are made through the settings.
"""

from __future__ import annotations

import configparser
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hapi_cluster.paths import ClusterPaths
from hapi_cluster.settings import (
    LAYOUTS,
    ClusterSettings,
    object_names,
    server_kind,
)

Sections = Mapping[str, Mapping[str, str]]

BACKEND_HOST = "127.0.0.1"
RINGS_NAME = "rings.json"
USERS: Mapping[str, tuple[str, str]] = {
    "test:tester": ("testing", ".admin"),
    "test2:tester2": ("testing2", ".admin"),
    "test:tester3": ("testing3", ""),
    "admin:admin": ("admin", ".admin .reseller_admin"),
}
"""Users of every cluster: (key, groups) by name.

They are those of Swift's own functional tests and publicly known: a cluster
serves one machine and its user, not a network.
"""

_HEADER = "# Written by hapi_cluster at every start: changes here are lost.\n"


@dataclass(frozen=True)
class Secrets:
    """Secrets of one cluster; they never change."""

    hash_suffix: str
    fernet_key: str
    encryption_root: str


@dataclass(frozen=True)
class Deployment:
    """Input of :func:`render_all`."""

    settings: ClusterSettings
    layout: str
    secrets: Secrets
    ports: Mapping[str, int]
    user: str
    paths: ClusterPaths
    worker_sockets: Mapping[str, Path]
    """By the worker's name; always with ``worker``, the proxy's."""


def render_all(deployment: Deployment) -> dict[str, str]:
    """Renders all configuration files, by name."""
    files = {
        "swift.conf": _swift(deployment),
        "proxy-server.conf": _proxy(deployment),
    }
    for name in deployment.worker_sockets:
        files[f"hapi-{name}.conf"] = _worker(deployment, name)
    additional = dict(deployment.settings.swift_options)
    for server in deployment.settings.backends:
        file = f"{server}-server.conf"
        files[file] = _backend(deployment, server)
        own = f"{server_kind(server)}-server.conf"
        additional[file] = additional.get(own, {})
    texts = {
        name: _text(_merged(sections, additional.get(name, {})))
        for name, sections in files.items()
    }
    names = object_names(deployment.settings.object_servers)
    ports = deployment.ports
    rings = {
        "layout": deployment.layout,
        "account": [ports["account"]],
        "container": [ports["container"]],
        "object": [ports[name] for name in names],
    }
    return {**texts, RINGS_NAME: json.dumps(rings) + "\n"}


def _merged(sections: Sections, additional: Sections) -> Sections:
    """The sections with additional options, which take precedence."""
    return {
        name: {**sections.get(name, {}), **additional.get(name, {})}
        for name in {**sections, **additional}
    }


def _text(sections: Sections) -> str:
    parser = configparser.RawConfigParser(
        delimiters=("=",), default_section=""
    )
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_dict(sections)
    buffer = io.StringIO(newline="\n")
    buffer.write(_HEADER)
    parser.write(buffer)
    return buffer.getvalue()


def _swift(deployment: Deployment) -> Sections:
    default, *others = LAYOUTS[deployment.layout].policies
    return {
        "swift-hash": {
            "swift_hash_path_suffix": deployment.secrets.hash_suffix
        },
        "storage-policy:0": {**default, "default": "yes"},
        **{
            f"storage-policy:{number}": policy
            for number, policy in enumerate(others, start=1)
        },
    }


def _defaults(
    deployment: Deployment, server: str, host: str
) -> Mapping[str, str]:
    return {
        "bind_ip": host,
        "bind_port": str(deployment.ports[server]),
        "bind_timeout": "3",
        "workers": "0",
        "user": deployment.user,
        "swift_dir": str(deployment.paths.etc),
        "log_name": f"{server}-server",
        "log_custom_handlers": "hapi_cluster.logs.to_stderr",
    }


def _backend(deployment: Deployment, server: str) -> Sections:
    kind = server_kind(server)
    sockets, settings = deployment.worker_sockets, deployment.settings
    worker_socket = sockets.get(f"{server}-worker")
    if kind == "object" and settings.shares_worker:
        worker_socket = sockets["worker"]
    hapi: dict[str, Mapping[str, str]] = {}
    if worker_socket is not None:
        hapi["filter:hapi_object"] = {
            "use": "egg:swift-hapi#hapi_object",
            "worker_socket": str(worker_socket),
            "backend_key_file": str(deployment.paths.backend_key),
            **settings.object_options,
        }
    filters = " ".join(["healthcheck", *(["hapi_object"] if hapi else [])])
    # Long timeouts, because no updater runs here: an object whose container
    # update timed out would never be listed.
    return {
        "DEFAULT": {
            **_defaults(deployment, server, BACKEND_HOST),
            "devices": str(deployment.paths.devices),
            "mount_check": "false",
            "fallocate_reserve": "0",
            "conn_timeout": "5",
            "node_timeout": "30",
            "container_update_timeout": "30",
        },
        "pipeline:main": {"pipeline": f"{filters} {kind}-server"},
        f"app:{kind}-server": {"use": f"egg:swift#{kind}"},
        "filter:healthcheck": {"use": "egg:swift#healthcheck"},
        **hapi,
    }


def pipeline(settings: ClusterSettings) -> list[str]:
    """The proxy's pipeline: the hapi filter right of auth, left of copy."""
    before = (
        "catch_errors gatekeeper healthcheck proxy-logging cache"
        " listing_formats container_sync bulk tempurl"
    )
    by_keystone = "authtoken s3api s3token keystoneauth"
    auth = by_keystone if settings.keystone_url else "s3api tempauth"
    after = (
        "copy container-quotas account-quotas slo dlo versioned_writes symlink"
    )
    return [
        *before.split(),
        *auth.split(),
        *(["hapi"] if settings.hapi_filter else []),
        *after.split(),
        *(["keymaster", "encryption"] if settings.encryption else []),
        "proxy-logging",
        "proxy-server",
    ]


def _proxy(deployment: Deployment) -> Sections:
    settings = deployment.settings
    names = pipeline(settings)
    sections = {
        "DEFAULT": _defaults(deployment, "proxy", settings.host),
        "pipeline:main": {"pipeline": " ".join(names)},
        "app:proxy-server": {
            "use": "egg:swift#proxy",
            "account_autocreate": "true",
            "allow_account_management": "true",
            # A busy machine must not suppress its only disk for a minute.
            "conn_timeout": "5",
            "node_timeout": "60",
            "recoverable_node_timeout": "60",
            "error_suppression_interval": "1",
        },
    }
    special = _special_filters(deployment)
    for name in names[:-1]:
        default = {"use": f"egg:swift#{name.replace('-', '_')}"}
        sections[f"filter:{name}"] = special.get(name, default)
    return sections


def _special_filters(
    deployment: Deployment,
) -> dict[str, dict[str, str]]:
    settings, secrets = deployment.settings, deployment.secrets
    return {
        "proxy-logging": {
            "use": "egg:swift#proxy_logging",
            # Its logger takes no custom handler.  Its lines reach stderr
            # anyway; the copy for syslog goes to the discard port.
            "access_log_udp_host": BACKEND_HOST,
            "access_log_udp_port": "9",
        },
        "cache": {
            "paste.filter_factory": "hapi_cluster.memory_cache:filter_factory"
        },
        "tempauth": {
            "use": "egg:swift#tempauth",
            "fernet_key_cluster": secrets.fernet_key,
            "active_fernet_key_id": "cluster",
            **{
                f"user_{name.replace(':', '_')}": " ".join(value).strip()
                for name, value in USERS.items()
            },
        },
        **_keystone(settings.keystone_url or ""),
        "hapi": {
            "use": "egg:swift-hapi#hapi",
            "worker_socket": str(deployment.worker_sockets["worker"]),
            **_places(deployment),
            **settings.filter_options,
        },
        "versioned_writes": {
            "use": "egg:swift#versioned_writes",
            "allow_versioned_writes": "true",
            "allow_object_versioning": "true",
        },
        "keymaster": {
            "use": "egg:swift#keymaster",
            "encryption_root_secret": secrets.encryption_root,
        },
    }


def _places(deployment: Deployment) -> dict[str, str]:
    settings = deployment.settings
    if not settings.object_workers:
        return {}
    return {
        "places": "object, proxy" if settings.worker else "object",
        "backend_key_file": str(deployment.paths.backend_key),
    }


def _keystone(url: str) -> dict[str, dict[str, str]]:
    # Filters further right decide on anonymous readers and temporary URLs.
    common = {"delay_auth_decision": "true"}
    return {
        "authtoken": {
            "paste.filter_factory": (
                "keystonemiddleware.auth_token:filter_factory"
            ),
            "www_authenticate_uri": url,
            "auth_url": url,
            "auth_type": "password",
            "user_domain_id": "default",
            "project_domain_id": "default",
            "cache": "swift.cache",
            **common,
        },
        "s3token": {"use": "egg:swift#s3token", "auth_uri": url, **common},
    }


def _worker(deployment: Deployment, name: str) -> Sections:
    return {
        "hapi-worker": {
            "socket": str(deployment.worker_sockets[name]),
            **deployment.settings.worker_options,
        }
    }
