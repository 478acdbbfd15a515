"""``?hapi-cache``: whose requests it takes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from swift.common import constraints
from swift.common.middleware import keystoneauth, tempauth
from swift.common.swob import Request

from fake_swift import CACHE_PATH, FakeSwift
from filter_under_test import (
    ACCOUNT,
    OTHER,
    SOURCE,
    Answer,
    FilterUnderTest,
    filter_and_worker,
    signed,
)
from hapi_middleware.rights import owner_refusal

QUERY = "?hapi-cache"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[FilterUnderTest]:
    with filter_and_worker(tmp_path) as world:
        yield world
        world.swift.assert_nothing_is_open()


def ask(
    world: FilterUnderTest,
    method: str = "GET",
    query: str = "",
    path: str = f"/{ACCOUNT}",
    **others: Any,
) -> Answer:
    return world.send(method, path, query=QUERY + query, **others)


def private(world: FilterUnderTest) -> list[dict[str, Any]]:
    calls = world.swift.calls
    return [env for env in calls if env["PATH_INFO"].startswith(CACHE_PATH)]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize(
    "query",
    [
        "&source=/train-0001.tar",
        "&source=//",
        "&source=a%00b",
        "&limit=0",
        "&limit=10001",
        "&limit=%C2%B2",
        f"&limit={'9' * 5000}",
        "&marker=%ff",
    ],
)
def test_what_is_not_understood_is_refused(
    world: FilterUnderTest, method: str, query: str
) -> None:
    answer = ask(world, method, query)
    assert (answer.status, answer.json["code"]) == (400, "bad_request")
    assert private(world) == []


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize(
    ("user", "path", "status"),
    [
        (None, f"/{ACCOUNT}", 401),
        ("test:tester3", f"/{ACCOUNT}", 403),
        ("test2:tester2", f"/{ACCOUNT}", 403),
        ("test:tester", f"/{OTHER}", 403),
    ],
)
def test_others_than_owners_are_refused(
    world: FilterUnderTest,
    method: str,
    user: str | None,
    path: str,
    status: int,
) -> None:
    assert ask(world, method, path=path, user=user).status == status
    assert private(world) == []


def test_right_by_an_override_is_no_owners(world: FilterUnderTest) -> None:
    def authorize(request: Request) -> None:
        request.environ["swift_owner"] = True

    allow_all = {
        "swift.authorize_override": True,
        "swift.authorize": authorize,
    }
    assert ask(world, "DELETE", user=None, env=allow_all).status == 403
    query = signed(world, SOURCE).replace("?", "&")
    assert ask(world, "DELETE", query, user=None).status == 401
    assert private(world) == []


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "OPTIONS"])
def test_other_methods_never_reach_swift(
    world: FilterUnderTest, method: str
) -> None:
    assert ask(world, method).status == 405
    assert world.swift.calls == []


@pytest.mark.parametrize(
    ("path", "query", "env"),
    [
        (f"/{ACCOUNT}/data", QUERY, {}),
        (SOURCE, QUERY, {}),
        (f"/{ACCOUNT}", "?prefix=hapi-cache", {}),
        (f"/{ACCOUNT}", QUERY, {"swift.source": "S3"}),
        (f"/{ACCOUNT}", QUERY, {"swift.source": "TA"}),
    ],
)
def test_what_is_not_of_an_accounts_cache_is_passed(
    world: FilterUnderTest, path: str, query: str, env: dict[str, Any]
) -> None:
    world.send("GET", path, query=query, env=env)
    assert private(world) == []
    assert world.swift.calls[-1]["PATH_INFO"] == f"/v1{path}"


def test_no_more_is_listed_than_the_operator_allows(
    world: FilterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "CONTAINER_LISTING_LIMIT", 7)
    ask(world)
    assert "limit=7&" in private(world)[-1]["QUERY_STRING"]


def test_trailing_slash_means_the_account(world: FilterUnderTest) -> None:
    answer = ask(world, path=f"/{ACCOUNT}/")
    assert (answer.status, answer.json["listed"]) == (200, [])


# --- who owns an account, by Swift's own auth middleware ------------------


@pytest.mark.parametrize(
    ("groups", "acl", "is_owner"),
    [
        ("test,test:tester,AUTH_test", {}, True),
        ("test,test:tester3", {}, False),
        ("ops,ops:root,.reseller_admin", {}, True),
        ("ops,ops:root,.reseller_reader", {}, False),
        ("test2,test2:tester2,AUTH_test2", {}, False),
        ("test2,test2:tester2", {"admin": ["test2"]}, True),
        ("test2,test2:tester2", {"read-write": ["test2"]}, False),
        ("test2,test2:tester2", {"read-only": ["test2"]}, False),
        (None, {"read-only": [""]}, False),
    ],
)
def test_owners_are_those_of_tempauth(
    groups: str | None, acl: dict[str, list[str]], is_owner: bool
) -> None:
    auth = tempauth.filter_factory({})(FakeSwift())
    info = {
        "status": 200,
        "account_really_exists": True,
        "sysmeta": {"core-access-control": json.dumps(acl)},
    }
    env = Request.blank(f"/v1{SOURCE}").environ | {
        "swift.authorize": auth.authorize,
        "swift.infocache": {f"account/{ACCOUNT}": info},
        "REMOTE_USER": groups,
        # Of another account, that this request has just been found to own.
        "swift_owner": True,
    }
    refusal = owner_refusal(env, ACCOUNT)
    assert (refusal is None) == is_owner


@pytest.mark.parametrize(
    ("options", "roles", "account", "status"),
    [
        ({}, "swiftoperator", "AUTH_5ad7", 200),
        ({}, "swiftoperator", ACCOUNT, 403),
        ({}, "member", "AUTH_5ad7", 403),
        ({}, "ResellerAdmin", ACCOUNT, 200),
        ({"project_reader_roles": "reader"}, "reader", "AUTH_5ad7", 403),
        ({"system_reader_roles": "reader"}, "reader", ACCOUNT, 403),
        ({"service_roles": "service"}, "swiftoperator", "AUTH_5ad7", 403),
    ],
)
def test_owners_are_those_of_keystone(
    world: FilterUnderTest,
    options: dict[str, str],
    roles: str,
    account: str,
    status: int,
) -> None:
    env = {
        "HTTP_X_IDENTITY_STATUS": "Confirmed",
        "HTTP_X_PROJECT_ID": "5ad7",
        "HTTP_X_PROJECT_NAME": "Rich",
        "HTTP_X_USER_ID": "77",
        "HTTP_X_USER_NAME": "joe",
        "HTTP_X_ROLES": roles,
    }
    app = keystoneauth.filter_factory(options)(world.filter)
    path = f"/{account}"
    assert ask(world, path=path, user=None, env=env, app=app).status == status
