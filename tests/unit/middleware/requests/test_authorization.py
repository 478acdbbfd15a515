"""Rights and charged accounts, with Swift's own auth middleware."""

import re
from pathlib import Path

import pytest
from swift.common.middleware import keystoneauth
from swift.common.registry import get_swift_info
from swift.common.swob import Request, Response

import hapi_middleware
from filter_under_test import (
    ACCOUNT,
    MODEL,
    OTHER,
    PACKAGE,
    SHARD,
    SOURCE,
    annotation,
    filter_and_worker,
    s3_env,
    signed,
)
from hapi_middleware.config import FilterConfig
from hapi_middleware.requests.authorization import (
    authorize_anonymous,
    is_owner,
    paying_account,
)
from hapi_protocol.errors import RightsError

DATA = f"/{ACCOUNT}/data"
MODELS = f"/{ACCOUNT}/models"
TESTER3 = "test:tester3"
TESTER2 = "test2:tester2"


@pytest.mark.parametrize("accounts", [frozenset(), frozenset({"AUTH_more"})])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    ("user", "path", "status"),
    [
        (None, SOURCE, 401),
        (TESTER3, SOURCE, 403),
        (TESTER2, SOURCE, 403),
        ("test:tester", f"{DATA}/no-such", 404),
        (TESTER2, f"{DATA}/no-such", 403),
    ],
)
def test_unreadable_source_is_answered_as_swift_does(
    world, accounts, method, user, path, status
):
    """Also to accounts that may not compute."""
    world.configure(allowed_accounts=accounts)
    plain = world.send(method, path, user=user)

    assert plain.status == status
    assert world.send(method, path, annotation(), user=user) == plain
    assert world.worker.calls == []


@pytest.mark.parametrize(
    ("user", "account"),
    [("test:tester", ACCOUNT), (TESTER3, ACCOUNT), (TESTER2, OTHER)],
)
def test_owner_and_readers_by_acl_are_charged_themselves(world, user, account):
    world.swift.read_acls.update({DATA: user, MODELS: user})

    assert world.send(headers=annotation(), user=user).status == 200
    assert world.worker.jobs[-1].charged_account == account


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_unreadable_model_is_refused_and_named(world, method, is_loaded):
    if is_loaded:
        world.send(headers=annotation())
        world.worker.calls.clear()
    world.swift.read_acls[DATA] = TESTER3
    plain = world.send(path=MODEL, user=TESTER3)
    answer = world.send(method, headers=annotation(), user=TESTER3)

    assert answer.status == plain.status == 403
    if method == "GET":
        found = answer.json
        assert (found["code"], found["object"]) == ("forbidden", MODEL)
        assert (found["object_role"], found["trans_id"]) == ("model", "tx1")
    assert world.worker.calls == []


def test_model_of_another_account_needs_its_acl(world):
    model = f"/{OTHER}/models/net.hapi"
    world.swift.put(model, PACKAGE)
    headers = annotation(model=model)

    assert world.send(headers=headers).status == 403
    world.swift.read_acls[f"/{OTHER}/models"] = "test:tester"
    assert world.send(headers=headers).status == 200


def test_missing_model_is_404_only_for_callers_that_may_know(world):
    world.swift.read_acls[DATA] = TESTER3
    headers = annotation(model="/AUTH_test/models/none")

    owner = world.send(headers=headers)
    stranger = world.send(headers=headers, user=TESTER3)

    assert owner.refusal == (404, "not_found")
    assert stranger.refusal == (403, "forbidden")


def test_anonymous_caller_without_right_on_the_model_gets_401(open_world):
    open_world.swift.read_acls[DATA] = ".r:*"
    answer = open_world.send(headers=annotation(), user=None)

    assert answer.refusal == (401, "unauthorized")
    assert "Www-Authenticate" in answer.headers


def test_right_on_the_source_is_checked_before_the_model(world):
    headers = annotation(model="/AUTH_test/models/none")
    answer = world.send(path=f"{DATA}/none", headers=headers)

    assert answer.status == 404
    assert answer.headers["Content-Type"].startswith("text/html")
    assert [r[1] for r in world.swift.requests()] == [f"/v1{DATA}/none"] * 2


@pytest.mark.parametrize(
    ("swift_status", "method", "refusal"),
    [
        (503, "HEAD", (503, "service_unavailable")),
        (412, "HEAD", (400, "bad_model")),
        (403, "GET", (403, "forbidden")),
    ],
)
def test_failing_model_read_is_refused(world, swift_status, method, refusal):
    """403 at GET: the right was lost after the HEAD."""
    world.swift.objects[MODEL].on_request = lambda request: (
        Response(status=swift_status, request=request)
        if request.method == method
        else None
    )
    answer = world.send(headers=annotation())

    assert answer.refusal == refusal
    expected = "1" if swift_status == 503 else None
    assert answer.headers.get("Retry-After") == expected


@pytest.mark.parametrize("body", [b"", b"P" * 21])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_empty_object_named_like_a_model_is_refused(world, body, method):
    world.send(headers=annotation())
    (digest,) = world.worker.digests.values()
    calls = len(world.worker.calls)
    name = f"/{OTHER}/models/{digest}"
    world.swift.put(name, body)
    world.swift.read_acls[DATA] = TESTER2

    answer = world.send(method, headers=annotation(model=name), user=TESTER2)

    assert answer.status == 422
    if method == "GET":
        assert answer.json["code"] == "bad_package"
    assert len(world.worker.calls) == calls


@pytest.mark.parametrize(
    "header", ["X_Static_Large_Object", "X_Object_Manifest"]
)
def test_manifest_as_a_package_is_refused(world, header):
    world.swift.put(MODEL, PACKAGE, **{header: "True"})
    answer = world.send(headers=annotation())

    assert answer.refusal == (422, "package_is_manifest")
    assert world.worker.calls == []


def test_model_changed_between_head_and_get_is_identified_again(world):
    second = PACKAGE + b"!"
    world.swift.may_be_unread = True
    swapped = []

    def swap(request):
        if request.method == "GET" and not swapped:
            swapped.append(True)
            etag = world.swift.put(MODEL, second).etag
            return _with_etag(request, second, etag)
        return None

    world.swift.objects[MODEL].on_request = swap

    assert world.send(headers=annotation()).status == 200
    (identity,) = world.worker.digests
    assert identity.length_bytes == len(second)
    assert world.worker.jobs[-1].model == identity
    assert world.worker.jobs[-1].model != world.worker.jobs[0].model


def _with_etag(request, body, etag):
    return Response(request=request, body=body, headers={"Etag": etag})


def test_model_that_keeps_changing_is_refused(world):
    world.swift.may_be_unread = True
    world.swift.objects[MODEL].on_request = lambda request: (
        _with_etag(request, PACKAGE + b"?", "0123")
        if request.method == "GET"
        else None
    )
    answer = world.send(headers=annotation())

    assert answer.refusal == (409, "model_changed")
    assert ("PUT", "/models") not in world.worker.calls


def _public(world):
    """Lets everybody read both objects, with and without a token."""
    acl = f"{TESTER2},.r:*"
    world.swift.read_acls.update({DATA: acl, MODELS: acl})
    return world


REQUESTS = {
    "features": (SOURCE, annotation()),
    "index": (SOURCE, {"X-Hapi-Index": "true"}),
    "profile": (MODEL, {"X-Hapi-Profile": "true"}),
}


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_account_that_is_not_listed_may_not_compute(world, kind, method):
    path, headers = REQUESTS[kind]
    world.configure(allowed_accounts=frozenset({OTHER, "AUTH_more"}))
    refused = _public(world).send(method, path, headers)
    assert refused.status == 403
    assert world.worker.calls == []
    if method == "GET":
        assert refused.json["code"] == "compute_not_allowed"
        assert ACCOUNT in refused.json["message"]
        assert OTHER not in refused.json["message"]
        # The caller counts, not the owner of the data.
        allowed = world.send(method, path, headers, user=TESTER2)
        assert allowed.status == 200
    assert world.send(method, path).status == 200


@pytest.mark.parametrize("accounts", [frozenset(), frozenset({OTHER})])
@pytest.mark.parametrize("is_allowed", [True, False])
def test_caller_without_a_project_needs_permission(
    world, accounts, is_allowed
):
    """The list of accounts does not decide on such callers."""
    world.configure(
        allowed_accounts=accounts, allow_unauthenticated_compute=is_allowed
    )
    answer = _public(world).send(headers=annotation(), user=None)
    if is_allowed:
        assert answer.status == 200
        assert world.worker.jobs[-1].charged_account == ".unauthenticated"
    else:
        assert answer.refusal == (403, "compute_not_allowed")
        assert world.worker.calls == []


def test_info_does_not_reveal_the_allowed_accounts(tmp_path):
    with filter_and_worker(tmp_path, allowed_accounts=OTHER):
        info = repr(get_swift_info(admin=True))
    assert OTHER not in info
    assert "allowed_accounts" not in info


TEMPAUTH = {"REMOTE_USER": "rich,rich:user,AUTH_rich"}
KEYSTONE = {
    "REMOTE_USER": ("5ad7", "Rich"),
    "keystone.identity": {"tenant": ("5ad7", "Rich")},
}
WITHOUT_PROJECT = {"keystone.identity": {"tenant": (None, None)}}
OVERRIDE = {"swift.authorize_override": True}


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"HTTP_X_PROJECT_ID": "rich", "HTTP_X_IDENTITY_STATUS": "Confirmed"},
        {"HTTP_X_TENANT_ID": "rich", "HTTP_X_USER_ID": "u"},
        {"REMOTE_USER": ".wsgi.tempurl"},
        {"REMOTE_USER": ".wsgi.tempurl,.wsgi.tempurl:x"},
        {"REMOTE_USER": "rich"},
        {"REMOTE_USER": "a,rich:user,AUTH_rich"},
        {"REMOTE_USER": ("rich", "Rich")},
        {"REMOTE_USER": None, **WITHOUT_PROJECT},
        {"keystone.identity": {"tenant": ("rich", "Rich")}},
        {"REMOTE_USER": (None, None), **WITHOUT_PROJECT},
        TEMPAUTH | OVERRIDE,
        KEYSTONE | OVERRIDE,
    ],
)
def test_caller_without_a_proven_project_has_none(env):
    with pytest.raises(RightsError) as caught:
        paying_account(env, FilterConfig())

    assert caught.value.code == "compute_not_allowed"
    anybody = FilterConfig(allow_unauthenticated_compute=True)
    assert paying_account(env, anybody) == ".unauthenticated"


@pytest.mark.parametrize(
    ("env", "project"),
    [
        (TEMPAUTH, "rich"),
        ({"REMOTE_USER": "rich,rich:user"}, "rich"),
        ({"REMOTE_USER": "rich,rich:user,.reseller_admin"}, "rich"),
        (KEYSTONE, "5ad7"),
        ({**KEYSTONE, "REMOTE_USER": "rich,rich:user"}, "rich"),
    ],
)
def test_project_is_the_one_that_the_auth_middleware_established(env, project):
    assert paying_account(env, FilterConfig()) == f"AUTH_{project}"
    prefixed = FilterConfig(reseller_prefix="KEY_")
    assert paying_account(env, prefixed) == f"KEY_{project}"


def _keystone(world, project, roles, status="Confirmed", **options):
    """Arguments of ``send`` for a caller behind keystoneauth."""
    env = {
        "HTTP_X_IDENTITY_STATUS": status,
        "HTTP_X_PROJECT_ID": project,
        "HTTP_X_PROJECT_NAME": "Project",
        "HTTP_X_USER_ID": "77",
        "HTTP_X_USER_NAME": "joe",
        "HTTP_X_ROLES": roles,
    }
    app = keystoneauth.filter_factory(options)(world.filter)
    return {"user": None, "env": env, "app": app}


@pytest.mark.parametrize(
    ("token", "status", "charged"),
    [("Confirmed", 200, ["AUTH_5ad7"]), ("Invalid", 403, [])],
)
def test_project_of_a_keystone_token_is_charged(world, token, status, charged):
    caller = _keystone(world, "5ad7", "member", token)
    answer = _public(world).send(headers=annotation(), **caller)

    assert answer.status == status
    accounts = {job.charged_account for job in world.worker.jobs}
    assert list(accounts) == charged


@pytest.mark.parametrize(
    ("project", "roles", "options", "status"),
    [
        ("test", "swiftoperator", {}, 200),
        ("test", "admin", {}, 200),
        ("test", "member", {}, 403),
        ("5ad7", "swiftoperator", {}, 403),
        ("5ad7", "ResellerAdmin", {}, 200),
        ("test", "reader", {"project_reader_roles": "reader"}, 403),
        ("5ad7", "reader", {"system_reader_roles": "reader"}, 403),
        ("test", "swiftoperator", {"service_roles": "service"}, 403),
    ],
)
def test_owners_are_those_of_keystone(world, project, roles, options, status):
    caller = _keystone(world, project, roles, **options)
    path = f"/{ACCOUNT}"
    for method in ("GET", "DELETE"):
        answer = world.send(method, path, query="?hapi-cache", **caller)
        assert answer.status == status
    calls = [(e["REQUEST_METHOD"], e["PATH_INFO"]) for e in world.swift.calls]
    assert ("DELETE", f"/v1{path}") not in calls


def _tempurl(world, model=MODEL):
    query = signed(world, SOURCE)
    return world.send(headers=annotation(model=model), user=None, query=query)


def test_tempurl_works_and_may_not_compute(world):
    world.swift.read_acls[MODELS] = ".r:*"
    query = signed(world, SOURCE)

    assert world.send(user=None, query=query).body == SHARD
    answer = world.send(headers=annotation(), user=None, query=query)
    assert answer.refusal == (403, "compute_not_allowed")
    assert world.worker.calls == []


def test_tempurl_with_a_public_model_computes_unauthenticated(open_world):
    open_world.swift.read_acls[MODELS] = ".r:*"

    assert _tempurl(open_world).body == SHARD.upper()
    assert open_world.worker.jobs[-1].charged_account == ".unauthenticated"
    # The override applies to the path of the source only.
    for env in open_world.swift.calls:
        if env.get("swift.source") == "HP":
            inherited = env.get("swift.authorize_override", False)
            assert inherited == (env["PATH_INFO"] == f"/v1{SOURCE}")
            assert ("REMOTE_USER" in env) == inherited


@pytest.mark.parametrize(
    "acl",
    ["", "test:tester", ".rlistings", ".r:example.com", ".r:*,.r:-unknown"],
)
def test_tempurl_gives_no_right_on_private_models(open_world, acl):
    # TempURL's own authorize would allow any object of the account.
    open_world.swift.read_acls[MODELS] = acl

    answer = _tempurl(open_world)

    assert answer.refusal == (401, "unauthorized")
    assert open_world.worker.calls == []


@pytest.mark.parametrize("model", [f"{DATA}/net.hapi", f"{MODELS}/none"])
def test_tempurl_opens_and_reveals_no_other_model(open_world, model):
    """Not even in the signed container."""
    open_world.swift.put(f"{DATA}/net.hapi", PACKAGE)

    assert _tempurl(open_world, model).status == 401


PRESIGNED = "X-Amz-Credential=test:tester/20261123/us-east-1/s3"
UNDER_S3_ACL = {
    "swift.source": "S3",
    "swift.authorize": lambda request: None,
    "swift.authorize_override": True,
}


@pytest.mark.parametrize(
    ("env", "auth"),
    [
        (s3_env(PRESIGNED), True),
        (s3_env("AWSAccessKeyId=test:tester&Signature=s"), True),
        # An Authorization header does not count if the URL is signed.
        (
            {
                **s3_env(f"versionId=1&{PRESIGNED}"),
                "HTTP_AUTHORIZATION": "AWS4-HMAC-SHA256 Credential=x",
            },
            True,
        ),
        # An unknown s3api.
        ({"swift.source": "S3"}, True),
        (
            {"swift.source": "S3", "s3api.auth_details": {"signature": "s"}},
            True,
        ),
        # Another middleware than tempauth has authorised it.
        (UNDER_S3_ACL | TEMPAUTH | {"swift_owner": True}, False),
    ],
)
def test_holder_of_a_grant_is_not_treated_as_its_giver(open_world, env, auth):
    def ask():
        how = {} if auth else {"user": None, "app": open_world.filter}
        return open_world.send(headers=annotation(), env=env, **how)

    assert ask().refusal == (401, "unauthorized")
    assert open_world.worker.calls == []

    open_world.swift.read_acls[MODELS] = ".r:*"
    assert ask().status == 200
    assert open_world.worker.jobs[-1].charged_account == ".unauthenticated"


@pytest.mark.parametrize(
    ("query", "expected"), [("", True), (PRESIGNED, False)]
)
def test_holder_of_a_presigned_url_owns_no_account(query, expected):
    def authorize(request):
        request.environ["swift_owner"] = True

    env = Request.blank(f"/v1{SOURCE}", environ=s3_env(query)).environ
    env["swift.authorize"] = authorize

    assert is_owner(env, ACCOUNT) == expected


def test_s3_caller_that_signs_its_request_is_charged_itself(world):
    env = s3_env("versionId=1")
    assert world.send(headers=annotation(), env=env).status == 200
    assert world.worker.jobs[-1].charged_account == ACCOUNT


def test_acl_probe_of_s3api_passes_unchanged(world):
    how = {"user": None, "env": UNDER_S3_ACL, "app": world.filter}
    answer = world.send("HEAD", headers=annotation(), **how)

    # The ACL is in headers that an annotated HEAD would not have.
    assert answer.headers["X-Object-Meta-Colour"] == "blue"


@pytest.mark.parametrize(
    ("method", "path", "admitted"),
    [
        ("GET", "/v1/a/c/o", True),
        ("HEAD", "/v1/a/c/o", True),
        ("PUT", "/v1/a/c/o", False),
        ("DELETE", "/v1/a/c/o", False),
        ("GET", "/v1/a/c", False),
        ("GET", "/v1/a", False),
    ],
)
def test_anonymous_reader_may_read_objects_only(method, path, admitted):
    request = Request.blank(path, environ={"REQUEST_METHOD": method})
    request.acl = ".r:*,.rlistings"
    refusal = authorize_anonymous(request)

    assert (refusal is None) == admitted
    assert admitted or refusal.status_int == 401


def test_no_subrequest_is_pre_authorised():
    """Except in the cache's own containers, the caller's right decides."""
    folder = Path(hapi_middleware.__file__).parent
    found = {
        str(module.relative_to(folder))
        for module in folder.rglob("*.py")
        if re.search("pre_?auth", module.read_text(), re.IGNORECASE)
    }
    assert found == {"cache/entries.py"}
