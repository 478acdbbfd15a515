"""TLS settings: CA bundle, client certificate, verification."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hapi_protocol.errors import ClientError

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True)
class TLSOptions:
    """TLS settings for the auth service and for Swift.

    Attributes:
        ca_file: bundle (or folder) of trusted authorities; None for the
            system's, or ``REQUESTS_CA_BUNDLE``.
        cert_file: client certificate, if the servers require one.
        key_file: key of the client certificate; None if it is in
            ``cert_file``.
        insecure: do not verify server certificates. Anyone on the path can
            read the password.

    Raises:
        ClientError: ``bad_configuration`` naming a missing file.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        for role, path in (
            ("CA bundle (OS_CACERT)", self.ca_file),
            ("client certificate (OS_CERT)", self.cert_file),
            ("client key (OS_KEY)", self.key_file),
        ):
            if path is not None and not os.path.exists(path):
                raise ClientError(
                    "bad_configuration", f"the {role} {path!r} does not exist"
                )
        if self.key_file is not None and self.cert_file is None:
            raise ClientError(
                "bad_configuration",
                f"the client key (OS_KEY) {self.key_file!r} needs its "
                "certificate, OS_CERT",
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> TLSOptions:
        """Reads ``OS_CACERT``, ``OS_CERT``, ``OS_KEY`` and ``OS_INSECURE``
        (or ``SWIFTCLIENT_INSECURE``).

        Raises:
            ClientError: ``bad_configuration`` naming the value.
        """
        return cls(
            ca_file=environ.get("OS_CACERT") or None,
            cert_file=environ.get("OS_CERT") or None,
            key_file=environ.get("OS_KEY") or None,
            insecure=any(
                _parse_bool(environ, variable)
                for variable in ("OS_INSECURE", "SWIFTCLIENT_INSECURE")
            ),
        )

    @property
    def verify(self) -> bool | str:
        """The ``verify`` argument for requests."""
        return False if self.insecure else self.ca_file or True

    @property
    def cert(self) -> str | tuple[str, str] | None:
        """The ``cert`` argument for requests."""
        if self.cert_file is None or self.key_file is None:
            return self.cert_file
        return self.cert_file, self.key_file


def _parse_bool(environ: Mapping[str, str], variable: str) -> bool:
    value = environ.get(variable, "")
    if value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise ClientError(
        "bad_configuration", f"{variable} is {value!r}; write true or false"
    )
