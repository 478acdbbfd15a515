"""Errors of the exchange with the worker."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager

from hapi_middleware.concurrency import HTTP_ERRORS
from hapi_protocol.errors import (
    MAX_BODY_BYTES,
    TooSlowError,
    UnavailableError,
    error_from_body,
)

RETRY_SECONDS = 2.0
"""A worker that restarts listens again after some seconds."""

_INTERNAL_STATUSES = (401, 403, 404, 405)
"""Statuses between worker and filter that would mislead a client."""


def read_answer(
    answer: http.client.HTTPResponse,
    expected: int,
    max_bytes: int = MAX_BODY_BYTES,
) -> bytes:
    """Reads the body of an answer with the expected status.

    Raises:
        http.client.IncompleteRead: the worker ended in the middle of it.
        HapiError: the worker's error, if it has another status.
    """
    with answer:
        body = answer.read(max_bytes + 1)
        # read() with a size does not report missing bytes.
        if answer.length and len(body) <= max_bytes:
            raise http.client.IncompleteRead(body, answer.length)
        if answer.status == expected:
            return body
    error = error_from_body(
        answer.status, body, retry_after=_retry_after(answer)
    )
    if answer.status in _INTERNAL_STATUSES or answer.status < 400:
        raise UnavailableError(
            "worker_unavailable",
            f"the worker answers {answer.status}: {error.message}",
            retry_after=RETRY_SECONDS,
        )
    raise error


def _retry_after(answer: http.client.HTTPResponse) -> float | None:
    value = answer.getheader("Retry-After", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        return None


@contextmanager
def socket_errors_as_hapi_errors(
    step: str, trans_id: str | None
) -> Iterator[None]:
    """Turns socket and HTTP errors of the block into HAPI errors.

    Args:
        step: the worker's part of the exchange, as an infinitive.
        trans_id: transaction id of the request, if there is one.
    """
    try:
        yield
    except TimeoutError as error:
        raise TooSlowError(
            "too_slow",
            f"the worker did not {step} in time",
            trans_id=trans_id,
            retry_after=RETRY_SECONDS,
        ) from error
    except (OSError, *HTTP_ERRORS) as error:
        raise UnavailableError(
            "worker_unavailable",
            f"the worker closed the connection before it could {step}: "
            f"{error!r}",
            trans_id=trans_id,
            retry_after=RETRY_SECONDS,
        ) from error
