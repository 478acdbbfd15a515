"""Signatures of requests from proxies to object servers (HMAC-SHA256).

Swift's backend ports are not authenticated.  A signature proves that a proxy
with the cluster's key has authorised exactly this request.  It hides nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import stat
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from hapi_protocol.backend import (
    HEADER_ADDRESS,
    HEADER_MESSAGE_BYTES,
    HEADER_NONCE,
    HEADER_POLICY,
    HEADER_SIGNATURE,
    HEADER_STEP,
    HEADER_TIMESTAMP,
    HEADER_VERSION,
)

MIN_KEY_BYTES = 32
"""Length of the hash's output; shorter keys are discouraged (RFC 2104, 3)."""
MAX_AGE_SECONDS = 60.0
"""Largest difference of the clocks of proxy and object server, with the time
that a request is under way.  Chosen, not measured: hosts with NTP differ by
milliseconds, and signatures are remembered for this long."""

_HEADERS = {
    "timestamp": HEADER_TIMESTAMP,
    "policy_index": HEADER_POLICY,
    "step": HEADER_STEP,
    "version": HEADER_VERSION,
    "address": HEADER_ADDRESS,
    "nonce": HEADER_NONCE,
}
"""Headers of the fields of a request."""


@dataclass(frozen=True)
class SignedRequest:
    """The parts of a request that a signature covers.

    Attributes:
        address: address of the object server, as :func:`address_text` has it.
        path: ``/device/partition/account/container/object``, not quoted.
        step: one of :data:`hapi_protocol.backend.STEPS`.
        version: version of the backend protocol.
        policy_index: number of the storage policy.
        timestamp: seconds since 1970, as text.
        nonce: text that no other request has.
        message: message of the request.  The bytes after it are not signed:
            those of a package must have the ETag in the message, and those of
            a source are computed for the proxy that sent them.
    """

    address: str
    path: str
    step: str
    version: str
    policy_index: str
    timestamp: str
    nonce: str
    message: bytes

    def signature(self, key: bytes) -> str:
        """The signature with a key, as hexadecimal text."""
        *texts, message = astuple(self)
        digest = hashlib.sha256(message).hexdigest()
        signed = json.dumps([*texts, digest]).encode()
        return hmac.new(key, signed, hashlib.sha256).hexdigest()

    def headers(self, key: bytes) -> dict[str, str]:
        """Headers that carry the request, signed with a key."""
        return {
            **{header: getattr(self, n) for n, header in _HEADERS.items()},
            HEADER_SIGNATURE: self.signature(key),
            HEADER_MESSAGE_BYTES: str(len(self.message)),
        }

    @classmethod
    def received(
        cls, path: str, header: Callable[[str], str], message: bytes
    ) -> SignedRequest:
        """The request that has arrived.

        Args:
            path: its path, not quoted.
            header: returns the value of a header, or an empty text.
            message: its message.
        """
        texts = {name: header(key) for name, key in _HEADERS.items()}
        return cls(path=path, message=message, **texts)


class Verifier:
    """Checks signatures, and that none is used twice.

    Args:
        keys: keys, of which any may have signed.
        clock: seconds since 1970.
        is_new: told a signature, the time at which it becomes too old, and
            the time now; False if it has been told it before.
        addresses: other addresses that this server has for proxies.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        clock: Callable[[], float],
        is_new: Callable[[str, float, float], bool],
        addresses: Collection[str] = (),
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._is_new = is_new
        self._addresses = addresses

    def problem(
        self, request: SignedRequest, signature: str, address: str
    ) -> str | None:
        """The reason to refuse a request; None if it is genuine.

        Args:
            request: the request.
            signature: the one that came with it.
            address: where it has arrived.
        """
        now = self._clock()
        try:
            age = now - float(request.timestamp)
        except ValueError:
            return "its timestamp is no number"
        if not abs(age) <= MAX_AGE_SECONDS:
            return f"it is {age:.0f} s old; compare the clocks of the hosts"
        given = signature.encode()
        if not any(
            hmac.compare_digest(request.signature(key).encode(), given)
            for key in self._keys
        ):
            return "its signature is wrong; compare the keys of the hosts"
        if request.address not in (address, *self._addresses):
            return (
                f"it is for {request.address}, and has arrived at {address}; "
                "if that is one server, name the first in the option addresses"
            )
        if not self._is_new(signature, now - age + MAX_AGE_SECONDS, now):
            return "it is repeated"
        return None


def address_text(host: str, port: int | str) -> str:
    """An address in the form in which it is signed.

    Args:
        host: an IP address in any of its forms, or a name.
        port: its port.
    """
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return f"{host}:{port}"
    plain = getattr(address, "ipv4_mapped", None) or address
    return f"[{plain}]:{port}" if plain.version == 6 else f"{plain}:{port}"


def read_keys(path: Path) -> list[bytes]:
    """Reads the keys of a file, one on each line.

    The first one signs, all are accepted: to rotate, add the new key as the
    second line everywhere, then make it the first, then remove the old one.

    Raises:
        ValueError: naming the file and the remedy.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = file.read().split(b"\n")
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); it holds the key of "
            "proxies and object servers, the same on all hosts"
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(
            f"{path} may be read by others; run 'chmod 600 {path}'"
        )
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ValueError(f"{path} has no key")
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY_BYTES:
            raise ValueError(
                f"{path}: key {number} has {len(key)} bytes; at least "
                f"{MIN_KEY_BYTES} are needed"
            )
    return keys
