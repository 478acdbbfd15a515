"""Stores one content as each kind of object that Swift has."""

from __future__ import annotations

import json
from urllib.parse import quote

from access_methods import Target
from caller import Caller

KINDS = ("plain", "slo", "dlo", "symlink", "version")


def store(
    owner: Caller, container: str, suffix: str, content: bytes, later: bytes
) -> dict[str, Target]:
    """Stores ``<kind>.<suffix>`` for each of KINDS.

    Segments and the link's target are in ``<container>-parts``.  The current
    version of the versioned object, in ``<container>-old``, is ``later``.
    """
    account = "AUTH_test"
    base, parts = f"/{account}/{container}", f"{container}-parts"
    middle = len(content) // 2 + 7
    halves = [content[:middle], content[middle:]]
    for number, half in enumerate(halves):
        owner.put(f"/{account}/{parts}/{suffix}-{number}", half)
    owner.put(f"/{account}/{parts}/whole.{suffix}", content)

    owner.put(f"{base}/plain.{suffix}", content)
    manifest = [{"path": f"/{parts}/{suffix}-{n}"} for n in (0, 1)]
    owner.put(
        f"{base}/slo.{suffix}?multipart-manifest=put",
        json.dumps(manifest).encode(),
    )
    prefix = quote(f"{parts}/{suffix}-")
    owner.put(f"{base}/dlo.{suffix}", b"", {"X-Object-Manifest": prefix})
    link = quote(f"{parts}/whole.{suffix}")
    owner.put(f"{base}/symlink.{suffix}", b"", {"X-Symlink-Target": link})

    targets = {
        kind: Target(account, container, f"{kind}.{suffix}") for kind in KINDS
    }
    targets["version"] = _old_version(
        owner, f"{container}-old", f"version.{suffix}", content, later
    )
    return targets


def _old_version(
    owner: Caller, container: str, name: str, content: bytes, later: bytes
) -> Target:
    current = Target("AUTH_test", container, name)
    owner.put(current.path, content)
    head = owner.request("HEAD", current.path)
    owner.put(current.path, later)
    version = head.headers["X-Object-Version-Id"]
    return Target("AUTH_test", container, name, version)


def make_containers(owner: Caller, container: str, read_acl: str) -> None:
    """Creates the three containers of :func:`store` with a read ACL."""
    for name, headers in (
        (container, {}),
        (f"{container}-parts", {}),
        (f"{container}-old", {"X-Versions-Enabled": "true"}),
    ):
        acl = {"X-Container-Read": read_acl}
        owner.put(f"/AUTH_test/{name}", headers={**headers, **acl})
