"""What a user may ask of a job, judged before any work."""

from __future__ import annotations

import math

from hapi_client.model.frozen_region import AUTO, FREEZE, STREAM
from hapi_protocol.encodings import FLOORS, Encoding, allowed_encodings
from hapi_protocol.errors import AnnotationError, ClientError
from hapi_protocol.headers import CACHE_MODES

ON_ERROR = ("raise", "skip")


def check_cut(cut: int | str) -> None:
    """Refuses what is a cut of no model.

    Raises:
        ClientError: ``bad_configuration`` naming what is allowed.
    """
    names = (AUTO, FREEZE, STREAM)
    if cut in names or (type(cut) is int and cut >= 0):
        return
    raise ClientError(
        "bad_configuration",
        f"cut is {cut!r}; 'auto' plans, 'freeze' is the whole frozen region, "
        "'stream' or 0 pushes nothing down, a number from 1 on is a cut",
    )


def checked_encodings(encoding: str | None, floor: str) -> tuple[str, ...]:
    """Canonical texts of the encodings that a plan may choose from.

    Args:
        encoding: the only one, if not None.
        floor: else, what it allows.

    Raises:
        ClientError: ``bad_configuration`` for an unknown one, or one that
            the floor does not allow.
    """
    try:
        allowed = allowed_encodings(floor)
        if encoding is None:
            return allowed
        chosen = Encoding.parse(encoding)
    except (AnnotationError, ValueError) as error:
        message = getattr(error, "message", str(error))
        raise ClientError("bad_configuration", message) from error
    # What nobody has asked for is no wish.
    if floor != FLOORS[0] and str(chosen) not in allowed:
        raise ClientError(
            "bad_configuration",
            f"encoding is {encoding!r}, which rounds more than floor "
            f"{floor!r} allows: leave one of them out",
        )
    return (str(chosen),)


def check_on_error(value: str) -> None:
    """
    Raises:
        ClientError: ``bad_configuration`` for another value.
    """
    if value not in ON_ERROR:
        raise ClientError(
            "bad_configuration",
            f"on_error is {value!r}; allowed: {', '.join(ON_ERROR)}",
        )


def check_epochs(epochs: float | None) -> None:
    """
    Raises:
        ClientError: ``bad_configuration`` for what is no number of epochs.
    """
    if epochs is not None and not 0 < epochs < math.inf:
        raise ClientError(
            "bad_configuration",
            f"epochs is {epochs!r}; a positive number, or None",
        )


def check_cache(cache: str) -> None:
    """
    Raises:
        ClientError: ``bad_configuration`` for what is no mode of the cache.
    """
    if cache not in CACHE_MODES:
        raise ClientError(
            "bad_configuration",
            f"cache is {cache!r}; one of {', '.join(CACHE_MODES)}",
        )
