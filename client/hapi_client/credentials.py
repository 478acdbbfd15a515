"""Who asks: Swift's v1 auth or Keystone v3, from arguments or environment.

The environment variables are those of the ``swift`` command: ``ST_AUTH``,
``ST_USER``, ``ST_KEY`` for v1, ``OS_AUTH_URL``, ``OS_USERNAME``,
``OS_PASSWORD``, ``OS_PROJECT_NAME``, … for Keystone v3, or
``OS_APPLICATION_CREDENTIAL_ID`` and ``OS_APPLICATION_CREDENTIAL_SECRET``.
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
        plugin: ``v1`` (tempauth, swauth), ``v3password`` (Keystone) or
            ``v3applicationcredential``.
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
            "OS_AUTH_URL, OS_USERNAME, OS_PASSWORD and OS_PROJECT_NAME, or "
            "OS_AUTH_URL, OS_APPLICATION_CREDENTIAL_ID and "
            "OS_APPLICATION_CREDENTIAL_SECRET",
        )

    @classmethod
    def _keystone(cls, environ: Mapping[str, str]) -> Credentials:
        by_secret = bool(environ.get("OS_APPLICATION_CREDENTIAL_ID"))
        return cls(
            "v3applicationcredential" if by_secret else "v3password",
            _secret_options(environ)
            if by_secret
            else _password_options(environ),
            region_name=environ.get("OS_REGION_NAME"),
            ca_file=environ.get("OS_CACERT"),
        )

    def make_plugin(self) -> Any:
        """The keystoneauth1 identity plugin."""
        options: dict[str, Any] = dict(self.options)
        if self.plugin == "v1":
            return authv1.PasswordPlugin(**options)
        if self.plugin == "v3applicationcredential":
            return v3.ApplicationCredential(**options)
        return v3.Password(**options)


def _password_options(environ: Mapping[str, str]) -> dict[str, str]:
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
    return options


def _secret_options(environ: Mapping[str, str]) -> dict[str, str]:
    names = ("id", "secret")
    return {
        "auth_url": environ["OS_AUTH_URL"],
        **{
            f"application_credential_{name}": _needed(
                environ, f"OS_APPLICATION_CREDENTIAL_{name.upper()}"
            )
            for name in names
        },
    }


def _needed(environ: Mapping[str, str], variable: str) -> str:
    value = environ.get(variable)
    if not value:
        raise ClientError(
            "bad_configuration", f"{variable} is not set in the environment"
        )
    return value
