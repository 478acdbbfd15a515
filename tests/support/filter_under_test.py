"""The filter between Swift's real auth middleware and the fake Swift."""

from __future__ import annotations

import hmac
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from swift.common.middleware import tempauth, tempurl
from swift.common.swob import HTTPNoContent, Request, Response
from swift.common.utils import close_if_possible, reiterate

from fake_swift import FakeSwift
from hapi_middleware.filter import filter_factory
from stub_worker import StubWorker

ACCOUNT = "AUTH_test"
OTHER = "AUTH_test2"
SOURCE = f"/{ACCOUNT}/data/shard 0.tar"
MODEL = f"/{ACCOUNT}/models/net.hapi"
SHARD = bytes(range(97, 123)) * 10_000
PACKAGE = b"PK" + b"weights " * 1000
FERNET_KEY = "2t3z8rRUDRuKm2H-0xXpNe6FC_D-YFF1jPbUCMkdFTg="
USERS = {
    "user_test_tester": "testing .admin",
    "user_test_tester3": "testing3",
    "user_test2_tester2": "testing2 .admin",
}
TEMPURL_KEY = "secret"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        import json

        return json.loads(self.body)


class FilterUnderTest:
    """``tempurl tempauth hapi`` in front of a :class:`FakeSwift`."""

    def __init__(
        self, swift: FakeSwift, worker: StubWorker, **options: str
    ) -> None:
        self.swift = swift
        self.worker = worker
        conf = {"worker_socket": worker.socket_path, **options}
        self.filter = filter_factory({}, **conf)(swift)
        auth_conf = {
            "fernet_key_one": FERNET_KEY,
            "active_fernet_key_id": "one",
            **USERS,
        }
        auth = tempauth.filter_factory(auth_conf)(self.filter)
        self.pipeline = tempurl.filter_factory({})(auth)

    def token(self, user: str) -> str:
        key = f"user_{user.replace(':', '_')}"
        request = Request.blank(
            "/auth/v1.0",
            headers={
                "X-Auth-User": user,
                "X-Auth-Key": USERS[key].split()[0],
            },
        )
        response = request.get_response(self.pipeline)
        return str(response.headers["X-Auth-Token"])

    def send(
        self,
        method: str = "GET",
        path: str = SOURCE,
        headers: dict[str, str] | None = None,
        *,
        user: str | None = "test:tester",
        query: str = "",
        env: dict[str, Any] | None = None,
        body: bytes | None = None,
        app: Any = None,
    ) -> Answer:
        """One request of ``user`` (None: anonymous), read and closed.

        As Swift's ``proxy-logging`` does it, which takes what ``iter()`` gives
        it of the body, and closes only that.
        """
        request = self.request(
            method, path, headers, user=user, query=query, env=env, body=body
        )
        status, fields, found = request.call_application(app or self.pipeline)
        chunks = reiterate(found)
        try:
            body = b"".join(chunks)
        finally:
            close_if_possible(chunks)
        return Answer(int(status.split()[0]), dict(fields), body)

    def request(
        self,
        method: str = "GET",
        path: str = SOURCE,
        headers: dict[str, str] | None = None,
        *,
        user: str | None = "test:tester",
        query: str = "",
        env: dict[str, Any] | None = None,
        body: bytes | None = None,
    ) -> Request:
        given = dict(headers or {})
        if user:
            given["X-Auth-Token"] = self.token(user)
        return Request.blank(
            f"/v1{quote(path)}{query}",
            environ={
                "REQUEST_METHOD": method,
                "swift.trans_id": "tx1",
                **(env or {}),
            },
            headers=given,
            body=body,
        )


class _Checker:
    """What s3api leaves in a request for the auth middleware."""

    def __init__(self, query: str) -> None:
        self.req = Request.blank(f"/bucket/key?{query}")

    def check_signature(self, secret: str) -> bool:
        raise AssertionError("another auth middleware than tempauth asks")


def s3_env(query: str = "") -> dict[str, Any]:
    """What s3api puts into a request.

    Args:
        query: of the client; with a signature there, or in its headers.
    """
    details = {"check_signature": _Checker(query).check_signature}
    return {"swift.source": "S3", "s3api.auth_details": details}


def annotation(**changes: str | None) -> dict[str, str]:
    """The headers of a good annotation, with some changed or left out."""
    headers = {"X-Hapi-Model": MODEL, "X-Hapi-Cut": "3"}
    for name, value in changes.items():
        header = f"X-Hapi-{name.replace('_', '-').title()}"
        headers.pop(header, None)
        if value is not None:
            headers[header] = value
    return headers


def signed(world: FilterUnderTest, path: str, method: str = "GET") -> str:
    """Make ``path`` readable by TempURL; return the query string."""
    expires = int(time.time()) + 600
    text = f"{method}\n{expires}\n/v1{path}"
    signature = hmac.new(TEMPURL_KEY.encode(), text.encode(), "sha256")
    give_tempurl_key(world)
    return f"?temp_url_sig={signature.hexdigest()}&temp_url_expires={expires}"


def give_tempurl_key(world: FilterUnderTest) -> None:
    """The account has the key that :func:`signed` signs with."""
    answer = world.swift._answer

    def with_key(request: Request) -> Response:
        if request.path_info == f"/v1/{ACCOUNT}":
            key = {"X-Account-Meta-Temp-Url-Key": TEMPURL_KEY}
            return HTTPNoContent(request=request, headers=key)
        return answer(request)

    world.swift._answer = with_key  # type: ignore[method-assign]


def stocked_swift() -> FakeSwift:
    """A shard and a package of the account ``AUTH_test``."""
    swift = FakeSwift()
    swift.put(SOURCE, SHARD, X_Object_Meta_Colour="blue")
    swift.put(MODEL, PACKAGE)
    return swift


@contextmanager
def filter_and_worker(
    directory: Path, **options: str
) -> Iterator[FilterUnderTest]:
    """A stocked Swift, a running worker, and the filter between."""
    worker = StubWorker(str(directory / "worker.sock"))
    with worker.running():
        yield FilterUnderTest(stocked_swift(), worker, **options)
