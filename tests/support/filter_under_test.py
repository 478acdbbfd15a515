"""The filter between Swift's real auth middleware and the fake Swift."""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import quote

from swift.common.middleware import tempauth, tempurl
from swift.common.swob import HTTPNoContent, Request, Response
from swift.common.utils import close_if_possible, reiterate

from fake_swift import FakeSwift
from hapi_cluster import memory_cache
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
    """The filter's answer to one request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def refusal(self) -> tuple[int, str]:
        """Status and error code."""
        return self.status, self.json["code"]


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
        self.auth = tempauth.filter_factory(auth_conf)(shown(self.filter))
        auth = hidden(tempurl.filter_factory({})(self.auth))
        # Older releases keep tokens there.
        self.pipeline = memory_cache.filter_factory({})(auth)

    def use(self, **parts: Any) -> None:
        """Replaces parts of the filter's context, for instance ``app``."""
        self.filter.context = replace(self.filter.context, **parts)

    @contextmanager
    def answering(
        self, answer: Callable[..., Iterator[bytes]]
    ) -> Iterator[None]:
        """Jobs have another answer meanwhile."""
        with patch.object(self.worker, "answer", answer):
            yield

    @contextmanager
    def without_worker(self) -> Iterator[None]:
        """The worker's socket is missing meanwhile."""
        path = Path(self.worker.socket_path)
        path.rename(path.with_suffix(".gone"))
        try:
            yield
        finally:
            path.with_suffix(".gone").rename(path)

    def configure(self, **options: Any) -> None:
        """Replaces typed options of the filter."""
        self.use(config=replace(self.filter.context.config, **options))

    def token(self, user: str) -> str:
        key = USERS[f"user_{user.replace(':', '_')}"].split()[0]
        headers = {"X-Auth-User": user, "X-Auth-Key": key}
        request = Request.blank("/auth/v1.0", headers=headers)
        response = request.get_response(self.pipeline)
        return str(response.headers["X-Auth-Token"])

    def send(
        self,
        method: str = "GET",
        path: str = SOURCE,
        headers: dict[str, str] | None = None,
        *,
        app: Any = None,
        **how: Any,
    ) -> Answer:
        """Sends a :meth:`request` and reads the answer.

        Reads and closes the iterator of the body only, as Swift's
        ``proxy-logging`` does.
        """
        request = self.request(method, path, headers, **how)
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
        """A request of ``user``; None: anonymous."""
        given = dict(headers or {})
        if user:
            given["X-Auth-Token"] = self.token(user)
        usual = {"REQUEST_METHOD": method, "swift.trans_id": "tx1"}
        return Request.blank(
            f"/v1{quote(path)}{query}",
            environ=usual | (env or {}),
            headers=given,
            body=body,
        )


def hidden(app: Callable[..., Any]) -> Callable[..., Any]:
    """Hides s3api from tempauth, which would check a signature.

    Newer releases do so only for requests without a token.
    """

    def run(env: dict[str, Any], start_response: Any) -> Any:
        if "s3api.auth_details" in env:
            env["hidden"] = env.pop("s3api.auth_details")
        return app(env, start_response)

    return run


def shown(app: Callable[..., Any]) -> Callable[..., Any]:
    """Shows it again, and hides the cache of tokens."""

    def run(env: dict[str, Any], start_response: Any) -> Any:
        env.pop("swift.cache", None)
        if "hidden" in env:
            env["s3api.auth_details"] = env.pop("hidden")
        return app(env, start_response)

    return run


class _Checker:
    """The signature checker that s3api puts into a request for auth."""

    def __init__(self, query: str) -> None:
        self.req = Request.blank(f"/bucket/key?{query}")

    def check_signature(self, secret: str) -> bool:
        raise AssertionError("another auth middleware than tempauth asks")


def s3_env(query: str = "") -> dict[str, Any]:
    """The environment that s3api adds to a request.

    Args:
        query: the client's query; has a signature if the URL is presigned.
    """
    details = {"check_signature": _Checker(query).check_signature}
    return {"swift.source": "S3", "s3api.auth_details": details}


def annotation(**changes: str | None) -> dict[str, str]:
    """The headers of a valid annotation, with some changed or omitted."""
    headers = {"X-Hapi-Model": MODEL, "X-Hapi-Cut": "3"}
    for name, value in changes.items():
        header = f"X-Hapi-{name.replace('_', '-').title()}"
        headers.pop(header, None)
        if value is not None:
            headers[header] = value
    return headers


def signed(world: FilterUnderTest, path: str) -> str:
    """The query of a temporary URL; gives the account the key for it."""
    answer = world.swift._answer

    def with_key(request: Request) -> Response:
        if request.path_info == f"/v1/{ACCOUNT}":
            key = {"X-Account-Meta-Temp-Url-Key": TEMPURL_KEY}
            return HTTPNoContent(request=request, headers=key)
        return answer(request)

    world.swift._answer = with_key  # type: ignore[method-assign]
    expires = int(time.time()) + 600
    text = f"GET\n{expires}\n/v1{path}"
    signature = hmac.new(TEMPURL_KEY.encode(), text.encode(), "sha256")
    return f"?temp_url_sig={signature.hexdigest()}&temp_url_expires={expires}"


@contextmanager
def filter_and_worker(
    directory: Path, **options: str
) -> Iterator[FilterUnderTest]:
    """Runs a worker, and a filter between it and a Swift with two objects."""
    worker = StubWorker(str(directory / "worker.sock"))
    swift = FakeSwift()
    swift.put(SOURCE, SHARD, X_Object_Meta_Colour="blue")
    swift.put(MODEL, PACKAGE)
    with worker.running():
        yield FilterUnderTest(swift, worker, **options)
