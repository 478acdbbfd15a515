"""Signatures of requests from proxies to object servers (HMAC-SHA256).

Swift's backend ports are not authenticated.  A signature proves that a proxy
with the cluster's key has authorised exactly this request.  It hides nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from hapi_protocol.backend import (
    HEADER_MESSAGE_BYTES,
    HEADER_NONCE,
    HEADER_POLICY,
    HEADER_SIGNATURE,
    HEADER_STEP,
    HEADER_TIMESTAMP,
    HEADER_VERSION,
)

MIN_KEY_BYTES = 32
MAX_AGE_SECONDS = 60.0
"""Largest difference of the clocks of proxy and object server, with the time
that a request is under way."""


@dataclass(frozen=True)
class SignedRequest:
    """The parts of a request that a signature covers.

    Attributes:
        path: ``/device/partition/account/container/object``, not quoted.
        step: one of :data:`hapi_protocol.backend.STEPS`.
        version: of the backend protocol.
        policy_index: of the storage policy.
        timestamp: seconds since 1970, as text.
        nonce: text that no other request has.
        message: of the request; the bytes after it are not signed: those of
            a package are hashed by the worker, and those of a source are
            computed for the proxy that sent them.
    """

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
            HEADER_TIMESTAMP: self.timestamp,
            HEADER_POLICY: self.policy_index,
            HEADER_STEP: self.step,
            HEADER_VERSION: self.version,
            HEADER_NONCE: self.nonce,
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
        return cls(
            path=path,
            step=header(HEADER_STEP),
            version=header(HEADER_VERSION),
            policy_index=header(HEADER_POLICY),
            timestamp=header(HEADER_TIMESTAMP),
            nonce=header(HEADER_NONCE),
            message=message,
        )


class Verifier:
    """Checks signatures, and that none is used twice in this process.

    Args:
        keys: keys, of which any may have signed.
        clock: seconds since 1970.
    """

    def __init__(
        self, keys: Sequence[bytes], clock: Callable[[], float]
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._seen: dict[str, float] = {}

    def problem(self, request: SignedRequest, signature: str) -> str | None:
        """The reason to refuse a request; None if it is genuine."""
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
        if signature in self._seen:
            return "it is repeated"
        # In the order of arrival, so the oldest are first.
        for old, until in list(self._seen.items()):
            if until > now:
                break
            del self._seen[old]
        self._seen[signature] = now + 2 * MAX_AGE_SECONDS
        return None


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
