"""Who asks: Swift's v1 auth or Keystone v3, from arguments or environment.

The environment variables are those of the ``swift`` command: ``ST_AUTH``,
``ST_USER``, ``ST_KEY`` for v1, ``OS_AUTH_URL``, ``OS_USERNAME``,
``OS_PASSWORD``, ``OS_PROJECT_NAME``, … for Keystone v3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keystoneauth1.identity import v3
from swiftclient import authv1

from hapi_protocol.errors import ClientError

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
    """What keystoneauth1 needs to get a token.

    Attributes:
        plugin: ``v1`` (tempauth, swauth) or ``v3password`` (Keystone).
        options: keyword arguments of that plugin, the password among
            them; never shown by ``repr``.
        region_name: Keystone region of the object store, if several.
        ca_file: bundle that TLS certificates are checked against; None
            for the system's.
    """

    plugin: str
    options: Mapping[str, str] = field(repr=False)
    region_name: str | None = None
    ca_file: str | None = None

    @classmethod
    def v1(cls, auth_url: str, user: str, key: str) -> Credentials:
        """Swift's v1 auth, as ``ST_AUTH``, ``ST_USER``, ``ST_KEY``."""
        return cls(
            "v1", {"auth_url": auth_url, "username": user, "password": key}
        )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Credentials:
        """Reads ``ST_*``, or else ``OS_*``.

        Raises:
            ClientError: ``bad_configuration`` naming what is missing.
        """
        if environ.get("ST_AUTH"):
            return cls.v1(
                environ["ST_AUTH"],
                _needed(environ, "ST_USER"),
                _needed(environ, "ST_KEY"),
            )
        if environ.get("OS_AUTH_URL"):
            return cls._keystone(environ)
        raise ClientError(
            "bad_configuration",
            "no credentials; set ST_AUTH, ST_USER and ST_KEY, or "
            "OS_AUTH_URL, OS_USERNAME, OS_PASSWORD and OS_PROJECT_NAME",
        )

    @classmethod
    def _keystone(cls, environ: Mapping[str, str]) -> Credentials:
        _needed(environ, "OS_USERNAME")
        _needed(environ, "OS_PASSWORD")
        options = {
            option: environ[variable]
            for variable, option in _KEYSTONE_VARIABLES.items()
            if environ.get(variable)
        }
        for option in ("user_domain", "project_domain"):
            if not {f"{option}_name", f"{option}_id"} & options.keys():
                options[f"{option}_id"] = "default"
        return cls(
            "v3password",
            options,
            region_name=environ.get("OS_REGION_NAME"),
            ca_file=environ.get("OS_CACERT"),
        )

    def make_plugin(self) -> Any:
        """The keystoneauth1 identity plugin."""
        options: dict[str, Any] = dict(self.options)
        if self.plugin == "v1":
            return authv1.PasswordPlugin(**options)
        return v3.Password(**options)


def _needed(environ: Mapping[str, str], variable: str) -> str:
    value = environ.get(variable)
    if not value:
        raise ClientError(
            "bad_configuration", f"{variable} is not set in the environment"
        )
    return value
