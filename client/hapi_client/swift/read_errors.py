"""Errors of reading what an index lists: what they mean, and what helps."""

from __future__ import annotations

from hapi_protocol.errors import (
    HapiError,
    SourceChangedError,
    UnavailableError,
)

BROKEN_SEGMENT = (
    "a segment of this large object is not that of its manifest.  Either a "
    "replica is old, which Swift's replicator mends, or the segment was "
    "replaced or deleted; then upload the object again, and run 'hapi index' "
    "for the data set"
)


def source_changed(
    container: str, name: str, trans_id: str | None = None
) -> SourceChangedError:
    """Makes the error for a shard that differs from its index."""
    return SourceChangedError(
        "source_changed",
        f"{container}/{name} has changed since its index was written; run "
        "'hapi index' for the data set",
        object_name=f"{container}/{name}",
        trans_id=trans_id,
    )


def unreadable(error: HapiError, container: str, name: str) -> HapiError:
    """Says what an error of reading an indexed object means, if known."""
    path = f"{container}/{name}"
    if error.code == "source_changed":
        return source_changed(container, name, error.trans_id)
    if error.status == 404 and error.details.get("object_role") != "model":
        error.message = (
            f"{path} is in the index, and was deleted or has expired since "
            "(404); upload it again, or run 'hapi index' for the data set to "
            "leave it out"
        )
    elif error.status == 409 and error.code == "job_conflict":
        # Swift's answer for the first segment; later ones break the body off.
        return UnavailableError(
            "source_damaged",
            f"{path} cannot be read (409): {BROKEN_SEGMENT}",
            object_name=path,
            trans_id=error.trans_id,
        )
    return error
