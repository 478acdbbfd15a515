"""Versions of the protocol, and their negotiation.

The proxy's ``/info`` lists the versions of its filter; a client uses the
newest one that both support.  Filter and worker come from one release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hapi_protocol.errors import AnnotationError, ClientError, UnavailableError

API_VERSION = 1
"""Newest version of the protocol."""

VERSIONS = (1,)
"""All supported versions, newest first."""

_WORKER_RETRY_SECONDS = 30.0
"""Chosen, not measured: an operator who updates a host restarts both."""


def common_version(section: Mapping[str, Any], proxy: str, client: str) -> int:
    """The newest version that client and filter both support.

    Args:
        section: section ``hapi`` of the proxy's ``/info``.
        proxy: name of the proxy, for the message.
        client: release of this client, for the message.

    Raises:
        ClientError: ``unsupported_version``: there is none; names the side
            to replace.
    """
    theirs = _listed_versions(section)
    common = [version for version in VERSIONS if version in theirs]
    if common:
        return common[0]
    # A list in an unknown form comes from a newer release.
    is_newer = min(theirs) > max(VERSIONS) if theirs else "versions" in section
    raise ClientError(
        "unsupported_version",
        f"the hapi filter of {proxy} supports {_text(theirs)} of the "
        f"protocol, this client (swift-hapi {client}) {_text(VERSIONS)}: "
        f"install {'a newer' if is_newer else 'an older'} client, "
        "or stream (cut 0, which needs no filter) until the proxy is updated",
    )


def _listed_versions(section: Mapping[str, Any]) -> tuple[int, ...]:
    listed = section.get("versions", [section.get("version")])
    if not isinstance(listed, list):
        return ()
    return tuple(version for version in listed if type(version) is int)


def _text(versions: tuple[int, ...]) -> str:
    if not versions:
        return "no readable version"
    word = "version" if len(versions) == 1 else "versions"
    return f"{word} {', '.join(map(str, versions))}"


def check_worker_version(version: Any, what: str) -> None:
    """Checks that a message of filter or worker is of this release.

    Args:
        version: the message's field.
        what: name of the message in errors.

    Raises:
        UnavailableError: ``worker_unavailable``: filter and worker are of
            different releases; clients stream meanwhile.
        AnnotationError: ``bad_request``: it is not a version.
    """
    if type(version) is not int:
        raise AnnotationError(
            "bad_request", f"{what}: version is {version!r:.80}"
        )
    if version != API_VERSION:
        raise UnavailableError(
            "worker_unavailable",
            f"{what} of version {version!r:.80}; expected version "
            f"{API_VERSION}: run filter and worker of one release",
            retry_after=_WORKER_RETRY_SECONDS,
        )
