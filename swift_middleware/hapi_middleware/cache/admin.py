"""``GET`` and ``DELETE /v1/<account>?hapi-cache``: list and purge the cache.

For owners of the account only.  Entries can be listed and deleted even if the
option ``cache`` is off.

Parameters: ``source`` selects the entries of ``<container>``,
``<container>/<object>``, or ``<container>/<prefix>/`` for all objects whose
names begin with ``<prefix>/``; ``limit`` is the maximum number of entries;
``marker`` is the previous answer's marker.  Answers are JSON:

* GET: ``entries`` and ``bytes`` of the whole account, by container listings;
  ``listed``, each {source, key, bytes, stored}; ``marker``, null at the end.
* DELETE: ``deleted``, the number of entries; ``marker``.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

from swift.common import constraints
from swift.common.request_helpers import split_reserved_name
from swift.common.swob import Response
from swift.common.utils import drain_and_close, split_path

from hapi_middleware.cache.entries import entry_prefix, private_request
from hapi_middleware.metrics import FilterMetrics
from hapi_middleware.requests.annotation_request import Env
from hapi_middleware.requests.authorization import owner_refusal
from hapi_middleware.requests.subrequests import SwiftAnswerError
from hapi_protocol.errors import AnnotationError, HapiError, make_error

PARAMETER = "hapi-cache"
DEFAULT_LIMIT = 1000
MAX_LIMIT = 10_000
"""Swift's default of ``container_listing_limit``; a lower one of the cluster
holds as well.  The default is a tenth, for answers of a moderate size."""
DELETE_SECONDS = 20.0
"""Time limit of one DELETE; the client continues from its marker."""


def is_cache_request(env: Env) -> bool:
    """Returns True for a client's request about an account's cache."""
    query = env.get("QUERY_STRING", "")
    # In any spelling: Swift would treat it as a request for the account.
    if not (PARAMETER in query or "%" in query) or env.get("swift.source"):
        return False
    return PARAMETER in _parameters(query) and _account(env) is not None


def _parameters(query: str) -> dict[str, str]:
    return dict(parse_qsl(query, keep_blank_values=True))


def _account(env: Env) -> str | None:
    try:
        version, account = split_path(env["PATH_INFO"], 2, 2)
        if not constraints.valid_api_version(version):
            return None
        return str(account.encode("latin1").decode("utf-8"))
    except ValueError:
        return None


@dataclass(frozen=True)
class _Page:
    """Selection of entries by one request.

    Attributes:
        prefix: prefix of the entries' names.
        limit: maximum number of entries.
        marker: name after which the selection starts.
    """

    prefix: str
    limit: int
    marker: str


@dataclass(eq=False, repr=False)
class CacheAdmin:
    """Handles one request about an account's cache.

    Args:
        app: the rest of the pipeline.
        env: WSGI environment of the client's request.
        metrics: metrics of the filter.
    """

    app: Any
    env: Env
    metrics: FilterMetrics

    def __post_init__(self) -> None:
        self._account = _account(self.env) or ""

    def answer(self) -> Any:
        """Returns a WSGI application: the listing, or the number deleted.

        Raises:
            SwiftAnswerError: the caller does not own the account.
            HapiError: the request is wrong, or Swift fails.
        """
        method = self.env["REQUEST_METHOD"]
        actions = {"GET": self._list, "DELETE": self._purge}
        if method not in actions:
            raise make_error(
                "method_not_allowed",
                f"{method} ?{PARAMETER}: allowed are {', '.join(actions)}",
            )
        refusal = owner_refusal(self.env, self._account)
        if refusal is not None:
            raise SwiftAnswerError(refusal)
        page = _parse_page(_parameters(self.env["QUERY_STRING"]))
        body = json.dumps(actions[method](page)).encode() + b"\n"
        self.metrics.count("cache_requests")
        return Response(
            status=200,
            headers={
                "Content-Type": "application/json; charset=UTF-8",
                "Cache-Control": "private, no-store",
            },
            body=body,
        )

    def _list(self, page: _Page) -> dict[str, Any]:
        entries, totals = self._entries(page)
        return {
            "entries": totals[0],
            "bytes": totals[1],
            "listed": [_listed_entry(entry) for entry in entries],
            "marker": _next_marker(entries, page),
        }

    def _purge(self, page: _Page) -> dict[str, Any]:
        entries, _totals = self._entries(page)
        deadline = time.monotonic() + DELETE_SECONDS
        num_deleted = 0
        done: list[dict[str, Any]] = []
        for entry in entries:
            if done and time.monotonic() > deadline:
                break
            num_deleted += self._delete(entry["name"])
            done.append(entry)
        is_all = len(done) == len(entries)
        marker = _next_marker(done, page) if is_all else _marker(done[-1])
        if marker is None and not page.prefix:
            # Swift deletes no account with a container, even an empty one.
            self._send("DELETE", None, allowed=(404, 409))
        return {"deleted": num_deleted, "marker": marker}

    def _delete(self, name: str) -> bool:
        response = self._send("DELETE", name, allowed=(404,))
        return bool(response.is_success)

    def _entries(
        self, page: _Page
    ) -> tuple[list[dict[str, Any]], tuple[int, int]]:
        query = {
            "format": "json",
            "limit": str(page.limit),
            "prefix": page.prefix,
            "marker": page.marker,
        }
        response = self._send("GET", None, urlencode(query), allowed=(404,))
        if response.status_int == 404:
            return [], (0, 0)
        headers = response.headers
        num_entries = int(headers.get("X-Container-Object-Count", 0))
        num_bytes = int(headers.get("X-Container-Bytes-Used", 0))
        return json.loads(response.body or b"[]"), (num_entries, num_bytes)

    def _send(
        self,
        method: str,
        name: str | None,
        query: str = "",
        *,
        allowed: tuple[int, ...] = (),
    ) -> Response:
        request = private_request(
            self.env, method, self._account, name, query=query
        )
        response = request.get_response(self.app)
        if method != "GET" or not response.is_success:
            drain_and_close(response)
        if response.is_success or response.status_int in allowed:
            return response
        raise self._failure(response)

    def _failure(self, response: Response) -> HapiError:
        text = f"the cache of {self._account}: Swift answers {response.status}"
        if response.status_int == 405:
            # Swift's read_only filter: a retry would not help.
            return make_error("method_not_allowed", text)
        return make_error("service_unavailable", text, retry_after=1)


def _parse_page(parameters: Mapping[str, str]) -> _Page:
    container, _, name = parameters.get("source", "").partition("/")
    limit = parameters.get("limit", str(DEFAULT_LIMIT))
    is_number = limit.isascii() and limit.isdigit() and len(limit) < 10
    if not is_number or not 1 <= int(limit) <= MAX_LIMIT:
        raise _bad("limit", limit, f"a number from 1 to {MAX_LIMIT}")
    # Without a container, a DELETE would select all entries.
    is_bad = bool(name) and not container
    if is_bad or "\x00" in container + name:
        raise _bad(
            "source",
            parameters["source"],
            "<container>[/<object>] or <container>/<prefix>/",
        )
    return _Page(
        entry_prefix(container, name),
        min(int(limit), constraints.CONTAINER_LISTING_LIMIT),
        _parse_marker(parameters.get("marker", "")),
    )


def _parse_marker(text: str) -> str:
    try:
        return base64.b64decode(text, b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise _bad("marker", text, "the previous answer's marker") from None


def _marker(entry: Mapping[str, Any]) -> str:
    return base64.urlsafe_b64encode(entry["name"].encode()).decode()


def _next_marker(entries: list[dict[str, Any]], page: _Page) -> str | None:
    return _marker(entries[-1]) if len(entries) == page.limit else None


def _listed_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    container, name, key = split_reserved_name(entry["name"])
    return {
        "source": f"{container}/{name}",
        "key": key,
        "bytes": entry["bytes"],
        "stored": entry["last_modified"],
    }


def _bad(name: str, value: str, expected: str) -> HapiError:
    return AnnotationError(
        "bad_request",
        f"{PARAMETER}: {name} is {value!r}; it must be {expected}",
    )
