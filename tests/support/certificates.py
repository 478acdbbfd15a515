"""Certificates of an authority of our own, made for each use."""

from __future__ import annotations

import ipaddress
import ssl
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Signs for 127.0.0.1.

    Args:
        folder: of all files.
        name: of the authority and its files.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca_file = str(folder / f"{name}.pem")
        self._write(self.ca_file, self._signed(self._name, self._key, True))

    def certify(self, name: str) -> tuple[str, str]:
        """Files with a certificate and with its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        paths = tuple(
            str(self._folder / f"{name}.{part}") for part in ("crt", "key")
        )
        self._write(paths[0], self._signed(subject, key, False))
        Path(paths[1]).write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return paths[0], paths[1]

    def server_context(self, *, asks_clients: bool = False) -> ssl.SSLContext:
        """TLS context of a server, which may ask for client certificates."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.certify("server"))
        if asks_clients:
            context.load_verify_locations(self.ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, is_ca: bool
    ) -> x509.Certificate:
        now = datetime.now(timezone.utc)
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(
            self._key.public_key()
        )
        here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(is_ca, None), True)
            .add_extension(own, False)
            .add_extension(signer, False)
            .add_extension(x509.SubjectAlternativeName([here]), False)
            .sign(self._key, hashes.SHA256())
        )

    @staticmethod
    def _write(path: str, certificate: x509.Certificate) -> None:
        data = certificate.public_bytes(serialization.Encoding.PEM)
        Path(path).write_bytes(data)
