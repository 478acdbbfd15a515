"""Credentials for v1 auth or Keystone: environment or ``clouds.yaml``.

The first of these environment variables that is set decides:

1. ``ST_AUTH`` with ``ST_USER`` and ``ST_KEY``: Swift's v1 auth,
2. ``OS_CLOUD``: an entry of ``clouds.yaml``,
3. ``OS_AUTH_URL``: Keystone v3, with ``OS_USERNAME``, ``OS_PASSWORD``,
   ``OS_PROJECT_NAME``, …, or with ``OS_APPLICATION_CREDENTIAL_ID`` and
   ``OS_APPLICATION_CREDENTIAL_SECRET``.

All three accept ``OS_REGION_NAME``, ``OS_INTERFACE`` (or
``OS_ENDPOINT_TYPE``), ``OS_STORAGE_URL``, ``OS_CACERT``, ``OS_CERT``,
``OS_KEY`` and ``OS_INSECURE``; each overrides the cloud's entry.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hapi_client.swift.clouds_yaml import find_cloud
from hapi_client.swift.tls import TLSOptions
from hapi_protocol.errors import ClientError

INTERFACES = ("public", "internal", "admin")
DEFAULT_INTERFACE = "public"
_KEYSTONE_VARIABLES = {
    "OS_AUTH_URL": "auth_url",
    "OS_USERNAME": "username",
    "OS_PASSWORD": "password",
    "OS_PROJECT_NAME": "project_name",
    "OS_PROJECT_ID": "project_id",
    "OS_USER_DOMAIN_NAME": "user_domain_name",
    "OS_USER_DOMAIN_ID": "user_domain_id",
    "OS_PROJECT_DOMAIN_NAME": "project_domain_name",
    "OS_PROJECT_DOMAIN_ID": "project_domain_id",
}


@dataclass(frozen=True)
class Credentials:
    """Everything that keystoneauth1 needs to get a token.

    Attributes:
        plugin: ``v1`` (tempauth, swauth), ``v3password`` (Keystone),
            ``v3applicationcredential``, or another plugin of keystoneauth1.
        options: keyword arguments of the plugin, including the password;
            never shown by ``repr``.
        region_name: Keystone region of the object store, if there are
            several.
        interface: endpoint of the catalogue: ``public``, ``internal`` or
            ``admin``.
        storage_url: URL of the account that replaces the catalogue's.
        tls: settings for the auth service and Swift.
        source: origin of the credentials, for messages.
    """

    plugin: str
    options: Mapping[str, Any] = field(repr=False)
    region_name: str | None = None
    interface: str = DEFAULT_INTERFACE
    storage_url: str | None = None
    tls: TLSOptions = field(default_factory=TLSOptions)
    source: str = field(default="arguments", compare=False)

    @classmethod
    def v1(cls, auth_url: str, user: str, key: str) -> Credentials:
        """Makes credentials for Swift's v1 auth."""
        return cls(
            "v1", {"auth_url": auth_url, "username": user, "password": key}
        )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Credentials:
        """Reads ``ST_*``, else ``OS_CLOUD``, else the other ``OS_*``.

        Raises:
            ClientError: ``bad_configuration`` naming the missing variable.
        """
        if environ.get("ST_AUTH"):
            options = {
                "auth_url": environ["ST_AUTH"],
                "username": _required(environ, "ST_USER"),
                "password": _required(environ, "ST_KEY"),
            }
            return cls._with_endpoint(environ, "v1", options, "ST_AUTH")
        if environ.get("OS_CLOUD"):
            return cls.from_cloud(environ["OS_CLOUD"], environ)
        if environ.get("OS_AUTH_URL"):
            return cls._keystone(environ)
        raise ClientError(
            "bad_configuration",
            "no credentials; set ST_AUTH, ST_USER and ST_KEY, or OS_CLOUD "
            "(clouds.yaml), or "
            "OS_AUTH_URL, OS_USERNAME, OS_PASSWORD and OS_PROJECT_NAME, or "
            "OS_AUTH_URL, OS_APPLICATION_CREDENTIAL_ID and "
            "OS_APPLICATION_CREDENTIAL_SECRET; for an embedded cluster, run "
            'eval "$(hapi cluster env DIR)"',
        )

    @classmethod
    def from_cloud(cls, name: str, environ: Mapping[str, str]) -> Credentials:
        """Reads the entry of a cloud in ``clouds.yaml``.

        Args:
            name: name of the cloud.
            environ: path of the file, and values that override the entry.

        Raises:
            ClientError: ``bad_configuration`` naming what is missing.
        """
        path, cloud = find_cloud(name, environ, environ.get("OS_REGION_NAME"))
        return cls._with_endpoint(
            {**_variables(cloud), **{k: v for k, v in environ.items() if v}},
            cloud.config["auth_type"],
            dict(cloud.config["auth"]),
            f"cloud {name!r} of {path}",
        )

    @classmethod
    def _keystone(cls, environ: Mapping[str, str]) -> Credentials:
        if environ.get("OS_APPLICATION_CREDENTIAL_ID"):
            plugin = "v3applicationcredential"
            options = _application_credential_options(environ)
        else:
            plugin, options = "v3password", _password_options(environ)
        return cls._with_endpoint(environ, plugin, options, "OS_AUTH_URL")

    @classmethod
    def _with_endpoint(
        cls,
        environ: Mapping[str, str],
        plugin: str,
        options: Mapping[str, Any],
        source: str,
    ) -> Credentials:
        """Adds the endpoint and TLS settings of the environment."""
        return cls(
            plugin,
            options,
            region_name=environ.get("OS_REGION_NAME") or None,
            interface=_interface(environ),
            storage_url=environ.get("OS_STORAGE_URL") or None,
            tls=TLSOptions.from_environment(environ),
            source=source,
        )

    @property
    def auth_url(self) -> str:
        """URL of the auth service; empty for plugins without one."""
        return str(self.options.get("auth_url", ""))

    def make_plugin(self) -> Any:
        """Makes the keystoneauth1 identity plugin."""
        # Imported here because keystoneauth1's loader is slow to import.
        options: dict[str, Any] = dict(self.options)
        if self.plugin == "v1":
            from swiftclient import authv1

            return authv1.PasswordPlugin(**options)
        from keystoneauth1 import loading
        from keystoneauth1.identity import v3

        if self.plugin == "v3applicationcredential":
            return v3.ApplicationCredential(**options)
        if self.plugin == "v3password":
            return v3.Password(**options)
        loader: Any = loading.get_plugin_loader(self.plugin)
        return loader.load_from_options(**options)


def _variables(cloud: Any) -> dict[str, str]:
    """Translates a cloud's entry to environment variables."""
    fields = cloud.config
    is_insecure = fields.get("insecure") or fields.get("verify") is False
    variables = {
        "OS_REGION_NAME": fields.get("region_name"),
        "OS_INTERFACE": fields.get("object_store_interface")
        or fields.get("interface"),
        "OS_STORAGE_URL": cloud.get_endpoint("object-store"),
        "OS_INSECURE": "true" if is_insecure else None,
        **{
            variable: os.path.expanduser(path) if path else None
            for variable, path in (
                ("OS_CACERT", fields.get("cacert")),
                ("OS_CERT", fields.get("cert")),
                ("OS_KEY", fields.get("key")),
            )
        },
    }
    return {name: str(value) for name, value in variables.items() if value}


def _interface(environ: Mapping[str, str]) -> str:
    """Returns keystoneauth1's name: ``public`` for ``publicURL``."""
    for variable in ("OS_INTERFACE", "OS_ENDPOINT_TYPE"):
        value = environ.get(variable)
        if value:
            name = value.removesuffix("URL")
            if name in INTERFACES:
                return name
            raise ClientError(
                "bad_configuration",
                f"{variable} is {value!r}; write one of "
                f"{', '.join(INTERFACES)}",
            )
    return DEFAULT_INTERFACE


def _password_options(environ: Mapping[str, str]) -> dict[str, str]:
    _required(environ, "OS_USERNAME")
    _required(environ, "OS_PASSWORD")
    options = {
        option: environ[variable]
        for variable, option in _KEYSTONE_VARIABLES.items()
        if environ.get(variable)
    }
    for option in ("user_domain", "project_domain"):
        if not {f"{option}_name", f"{option}_id"} & options.keys():
            options[f"{option}_id"] = "default"
    return options


def _application_credential_options(
    environ: Mapping[str, str],
) -> dict[str, str]:
    name = "application_credential"
    return {
        "auth_url": environ["OS_AUTH_URL"],
        f"{name}_id": _required(environ, f"OS_{name.upper()}_ID"),
        f"{name}_secret": _required(environ, f"OS_{name.upper()}_SECRET"),
    }


def _required(environ: Mapping[str, str], variable: str) -> str:
    value = environ.get(variable)
    if not value:
        raise ClientError(
            "bad_configuration", f"{variable} is not set in the environment"
        )
    return value
