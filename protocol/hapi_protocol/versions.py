"""Which versions of the protocol this release speaks, and with whom.

The proxy's ``/info`` says which ones its filter speaks; a client takes the
newest of them that it speaks too.  Filter and worker come from one release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hapi_protocol.errors import AnnotationError, ClientError, UnavailableError

API_VERSION = 1
"""The newest."""

VERSIONS = (1,)
"""All, newest first."""

_WORKER_RETRY_SECONDS = 30.0


def common_version(section: Mapping[str, Any], proxy: str, client: str) -> int:
    """The version in which a client speaks to a filter.

    Args:
        section: ``hapi`` of the proxy's ``/info``.
        proxy: its name, for the message.
        client: the release of this client, likewise.

    Raises:
        ClientError: ``unsupported_version``: there is none, and which side
            has to be replaced.
    """
    theirs = _spoken(section)
    common = [each for each in VERSIONS if each in theirs]
    if common:
        return common[0]
    # One that says what we cannot read is no older one.
    is_newer = min(theirs) > max(VERSIONS) if theirs else "versions" in section
    raise ClientError(
        "unsupported_version",
        f"the hapi filter of {proxy} speaks {_text(theirs)} of the protocol, "
        f"and this client (swift-hapi {client}) {_text(VERSIONS)}: install "
        f"{'a newer' if is_newer else 'an older'} client, "
        "or stream (cut 0, which needs no filter) until the proxy has "
        "another release",
    )


def _spoken(section: Mapping[str, Any]) -> tuple[int, ...]:
    listed = section.get("versions", [section.get("version")])
    if not isinstance(listed, list):
        return ()
    return tuple(each for each in listed if type(each) is int)


def _text(versions: tuple[int, ...]) -> str:
    if not versions:
        return "no version that can be read"
    word = "version" if len(versions) == 1 else "versions"
    return f"{word} {', '.join(map(str, versions))}"


def check_worker_version(version: Any, what: str) -> None:
    """Between filter and worker, where one was replaced before the other.

    Raises:
        UnavailableError: ``worker_unavailable``, so that clients stream
            meanwhile.
        AnnotationError: ``bad_request`` for what is no version at all.
    """
    if type(version) is not int:
        raise AnnotationError(
            "bad_request", f"{what} has no version, but {version!r:.80}"
        )
    if version != API_VERSION:
        raise UnavailableError(
            "worker_unavailable",
            f"{what} of version {version!r}; this side speaks version "
            f"{API_VERSION}: run filter and worker of one release",
            retry_after=_WORKER_RETRY_SECONDS,
        )
