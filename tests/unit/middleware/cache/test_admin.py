"""``?hapi-cache``: owners, refusals, listings and deletions."""

import json

import pytest
from swift.common import constraints
from swift.common.middleware import tempauth
from swift.common.swob import Request, Response, wsgi_to_str
from swift.common.utils import get_logger

from fake_swift import CACHE_PATH, FakeSwift
from filter_under_test import ACCOUNT, OTHER, SOURCE, signed
from hapi_middleware.cache import admin as cache_admin
from hapi_middleware.cache.admin import CacheAdmin
from hapi_middleware.cache.entries import entry_name
from hapi_middleware.metrics import FilterMetrics
from hapi_middleware.requests.authorization import owner_refusal

QUERY = "?hapi-cache"
METRICS = FilterMetrics(get_logger({}, log_route="hapi"))


def ask(world, method="GET", query="", path=f"/{ACCOUNT}", **others):
    return world.send(method, path, query=QUERY + query, **others)


def private(world):
    calls = world.swift.calls
    return [env for env in calls if env["PATH_INFO"].startswith(CACHE_PATH)]


def make_owner(request):
    """A ``swift.authorize`` that makes every caller an owner."""
    request.environ["swift_owner"] = True


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
def test_wrong_parameters_are_refused(world, method, query):
    answer = ask(world, method, query)
    assert answer.refusal == (400, "bad_request")
    assert private(world) == []


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize(
    ("user", "account", "status"),
    [
        (None, ACCOUNT, 401),
        ("test:tester3", ACCOUNT, 403),
        ("test2:tester2", ACCOUNT, 403),
        ("test:tester", OTHER, 403),
    ],
)
def test_others_than_owners_are_refused(world, method, user, account, status):
    answer = ask(world, method, path=f"/{account}", user=user)
    assert answer.status == status
    assert private(world) == []


def test_overridden_authorisation_makes_no_owner(world):
    env = {"swift.authorize_override": True, "swift.authorize": make_owner}
    assert ask(world, "DELETE", user=None, env=env).status == 403
    query = signed(world, SOURCE).replace("?", "&")
    assert ask(world, "DELETE", query, user=None).status == 401
    assert private(world) == []


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "OPTIONS"])
def test_other_methods_never_reach_swift(world, method):
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
def test_other_requests_pass_to_swift(world, path, query, env):
    world.send("GET", path, query=query, env=env)
    assert private(world) == []
    assert world.swift.calls[-1]["PATH_INFO"] == f"/v1{path}"


def test_listing_is_limited_by_the_operator(world, monkeypatch):
    monkeypatch.setattr(constraints, "CONTAINER_LISTING_LIMIT", 7)
    ask(world)
    assert "limit=7&" in private(world)[-1]["QUERY_STRING"]


@pytest.mark.parametrize(
    ("path", "query"),
    [(f"/{ACCOUNT}", "?%68api%2Dcache=&limit=5"), (f"/{ACCOUNT}/", QUERY)],
)
def test_request_is_recognised_in_any_spelling(world, path, query):
    """Otherwise Swift would be asked to delete the account."""
    answer = world.send("DELETE", path, query=query)
    assert answer.json == {"deleted": 0, "marker": None}
    deleted = [
        env["PATH_INFO"]
        for env in world.swift.calls
        if env["REQUEST_METHOD"] == "DELETE"
    ]
    assert all(path.startswith(CACHE_PATH) for path in deleted)


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
def test_owners_are_those_of_tempauth(groups, acl, is_owner):
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
    assert (owner_refusal(env, ACCOUNT) is None) == is_owner


class Entries:
    """A fake container of entries, given by the names of their sources."""

    def __init__(self, *sources):
        self.names = [entry_name(*each.split("/", 1), "k") for each in sources]
        self.listed = list(self.names)
        """Names in the listing, which may be out of date."""
        self.is_there = True
        self.deletes = []

    @property
    def sources(self):
        return ["/".join(name.split("\x00")[1:3]) for name in self.names]

    def __call__(self, env, start_response):
        request = Request(env)
        name = wsgi_to_str(request.path_info)[len(CACHE_PATH) + 1 :]
        respond = self._delete if request.method == "DELETE" else self._list
        response = Response(request=request, **respond(request, name))
        return response(env, start_response)

    def _list(self, request, name):
        given = request.params
        found = [
            {"name": name, "bytes": 7, "last_modified": "2026-01-01"}
            for name in sorted(self.listed)
            if name.startswith(given["prefix"]) and name > given["marker"]
        ]
        return {"body": json.dumps(found[: int(given["limit"])])}

    def _delete(self, request, name):
        self.deletes.append(name)
        if not name:
            self.is_there = bool(self.names)
            return {"status": 409 if self.names else 204}
        if name not in self.names:
            return {"status": 404}
        self.names.remove(name)
        self.listed.remove(name)
        return {"status": 204}

    def ask(self, method, query=""):
        env = Request.blank(f"/v1/{ACCOUNT}{QUERY}{query}").environ | {
            "REQUEST_METHOD": method,
            "swift.authorize": make_owner,
        }
        app = CacheAdmin(self, env, METRICS).answer()
        _status, _headers, chunks = Request(env).call_application(app)
        return json.loads(b"".join(chunks))


def test_account_is_purged_page_by_page():
    entries = Entries("a/1", "a/2", "b/1")
    first = entries.ask("DELETE", "&limit=2")
    assert (first["deleted"], entries.sources) == (2, ["b/1"])
    assert entries.is_there
    second = entries.ask("DELETE", f"&limit=2&marker={first['marker']}")
    assert second == {"deleted": 1, "marker": None}
    # Swift deletes no account with a container, even an empty one.
    assert not entries.is_there


def test_long_purge_continues_from_its_marker(monkeypatch):
    monkeypatch.setattr(cache_admin, "DELETE_SECONDS", -1.0)
    entries = Entries("a/1", "a/2", "a/3")
    marker = ""
    for number in (1, 2, 3):
        answer = entries.ask("DELETE", f"&marker={marker}")
        assert (answer["deleted"], len(entries.names)) == (1, 3 - number)
        marker = answer["marker"]
    assert marker is None


@pytest.mark.parametrize(
    ("source", "remaining"),
    [
        ("a", ["ab/1", "b/a"]),
        ("a/1", ["a/11", "a/1/x", "ab/1", "b/a"]),
        ("a/", ["ab/1", "b/a"]),
        ("a/1/", ["a/1", "a/11", "ab/1", "b/a"]),
        ("b/a/", ["a/1", "a/11", "a/1/x", "ab/1", "b/a"]),
        ("1", ["a/1", "a/11", "a/1/x", "ab/1", "b/a"]),
    ],
)
def test_only_entries_of_the_source_are_deleted(source, remaining):
    entries = Entries("a/1", "a/11", "a/1/x", "ab/1", "b/a")
    entries.ask("DELETE", f"&source={source}")
    assert entries.sources == remaining
    assert "" not in entries.deletes


def test_outdated_listing_counts_no_entry_twice():
    entries = Entries("a/1", "a/2")
    entries.names.remove(entry_name("a", "1", "k"))
    assert entries.ask("DELETE") == {"deleted": 1, "marker": None}


def test_listing_continues_after_its_marker():
    entries = Entries("a/1", "a/2", "a/3")
    first = entries.ask("GET", "&limit=2")
    rest = entries.ask("GET", f"&limit=2&marker={first['marker']}")
    assert [each["source"] for each in first["listed"]] == ["a/1", "a/2"]
    assert [each["source"] for each in rest["listed"]] == ["a/3"]
    assert rest["marker"] is None
