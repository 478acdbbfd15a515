"""Rights and charged accounts, with Swift's own auth middleware."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from swift.common.middleware import keystoneauth, tempurl
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
from hapi_protocol.job_messages import ModelIdentity

DATA = f"/{ACCOUNT}/data"
MODELS = f"/{ACCOUNT}/models"
TESTER3 = "test:tester3"
TESTER2 = "test2:tester2"


def _same(answer, plain):
    return (answer.status, answer.body) == (plain.status, plain.body)


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
    world, method, user, path, status
):
    plain = world.send(method, path, user=user)
    answer = world.send(method, path, annotation(), user=user)

    assert plain.status == status
    assert _same(answer, plain)
    assert answer.headers == plain.headers
    assert world.worker.calls == []


def test_reader_by_acl_may_compute(world):
    world.swift.read_acls.update({DATA: TESTER3, MODELS: TESTER3})

    assert world.send(headers=annotation(), user=TESTER3).status == 200


def test_reader_of_another_account_is_charged_itself(world):
    world.swift.read_acls.update({DATA: TESTER2, MODELS: TESTER2})
    headers = annotation(model=MODEL)

    assert world.send(headers=headers, user=TESTER2).status == 200
    assert world.worker.jobs[-1].charged_account == OTHER


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_unreadable_model_is_refused_and_named(world, method):
    world.swift.read_acls[DATA] = TESTER3
    plain = world.send(path=MODEL, user=TESTER3)
    answer = world.send(method, headers=annotation(), user=TESTER3)

    assert answer.status == plain.status == 403
    if method == "GET":
        assert answer.json["code"] == "forbidden"
        assert answer.json["object"] == MODEL
        assert answer.json["object_role"] == "model"
        assert answer.json["trans_id"] == "tx1"
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
def test_failing_subrequest_for_the_model_is_refused(
    world, swift_status, method, refusal
):
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


def test_loaded_model_needs_the_right_as_well(world):
    world.send(headers=annotation())
    calls = len(world.worker.calls)
    world.swift.read_acls[DATA] = TESTER3

    assert world.send(headers=annotation(), user=TESTER3).status == 403
    assert len(world.worker.calls) == calls


@pytest.mark.parametrize("body", [b"", b"P" * 21])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_empty_object_named_like_a_loaded_model_is_refused(
    world, body, method
):
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
            world.swift.put(MODEL, second)
            fresh = world.swift.objects[MODEL]
            return Response(
                request=request, body=fresh.body, headers={"Etag": fresh.etag}
            )
        return None

    world.swift.objects[MODEL].on_request = swap
    answer = world.send(headers=annotation())

    assert answer.status == 200
    (identity,) = world.worker.digests
    assert identity.length_bytes == len(second)
    assert world.worker.jobs[-1].model == identity
    assert world.worker.jobs[-1].model != world.worker.jobs[0].model


def test_model_that_keeps_changing_is_refused(world):
    def always_another(request):
        if request.method == "GET":
            other = PACKAGE + b"?"
            headers = {"Etag": "0123"}
            return Response(request=request, body=other, headers=headers)
        return None

    world.swift.may_be_unread = True
    world.swift.objects[MODEL].on_request = always_another
    answer = world.send(headers=annotation())

    assert answer.refusal == (409, "model_changed")
    assert ("PUT", "/models") not in world.worker.calls


def test_admin_and_member_of_an_account_are_charged_to_it(world):
    world.swift.read_acls.update({DATA: TESTER3, MODELS: TESTER3})
    world.send(headers=annotation())
    world.send(headers=annotation(), user=TESTER3)

    accounts = {job.charged_account for job in world.worker.jobs}
    assert accounts == {ACCOUNT}


def test_anonymous_compute_is_refused_by_default(world):
    world.swift.read_acls.update({DATA: ".r:*", MODELS: ".r:*"})
    answer = world.send(headers=annotation(), user=None)

    assert answer.refusal == (403, "compute_not_allowed")
    assert world.worker.calls == []


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


def test_unreadable_object_is_answered_as_before_to_an_account_not_listed(
    world,
):
    world.configure(allowed_accounts=frozenset({"AUTH_more"}))
    plain = world.send(user=TESTER2)
    answer = world.send(headers=annotation(), user=TESTER2)
    assert (plain.status, answer.status) == (403, 403)
    assert _same(answer, plain)


@pytest.mark.parametrize("is_allowed", [True, False])
def test_list_of_accounts_does_not_decide_on_callers_without_a_project(
    world, is_allowed
):
    world.configure(
        allowed_accounts=frozenset({OTHER}),
        allow_unauthenticated_compute=is_allowed,
    )
    answer = _public(world).send(headers=annotation(), user=None)
    if is_allowed:
        assert answer.status == 200
    else:
        assert answer.refusal == (403, "compute_not_allowed")


def test_info_does_not_reveal_the_allowed_accounts(tmp_path):
    with filter_and_worker(tmp_path, allowed_accounts=OTHER):
        info = repr(get_swift_info(admin=True))
    assert OTHER not in info
    assert "allowed_accounts" not in info


def test_anonymous_compute_is_charged_to_an_account_of_its_own(open_world):
    open_world.swift.read_acls.update({DATA: ".r:*", MODELS: ".r:*"})

    assert open_world.send(headers=annotation(), user=None).status == 200
    assert open_world.worker.jobs[-1].charged_account == ".unauthenticated"


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
        {"REMOTE_USER": None, "keystone.identity": {"tenant": (None, None)}},
        {"keystone.identity": {"tenant": ("rich", "Rich")}},
        {
            "REMOTE_USER": (None, None),
            "keystone.identity": {"tenant": (None, None)},
        },
        {
            "REMOTE_USER": "rich,rich:user,AUTH_rich",
            "swift.authorize_override": True,
        },
        {
            "REMOTE_USER": ("rich", "Rich"),
            "keystone.identity": {"tenant": ("rich", "Rich")},
            "swift.authorize_override": True,
        },
    ],
)
def test_caller_without_a_proven_project_has_none(env):
    with pytest.raises(RightsError) as caught:
        paying_account(env, FilterConfig())

    assert caught.value.code == "compute_not_allowed"
    anybody = FilterConfig(allow_unauthenticated_compute=True)
    assert paying_account(env, anybody) == ".unauthenticated"


@pytest.mark.parametrize(
    ("env", "account"),
    [
        ({"REMOTE_USER": "rich,rich:user,AUTH_rich"}, "AUTH_rich"),
        ({"REMOTE_USER": "rich,rich:user"}, "AUTH_rich"),
        ({"REMOTE_USER": "rich,rich:user,.reseller_admin"}, "AUTH_rich"),
        (
            {
                "REMOTE_USER": ("5ad7", "Rich"),
                "keystone.identity": {"tenant": ("5ad7", "Rich")},
            },
            "AUTH_5ad7",
        ),
        (
            {
                "REMOTE_USER": "rich,rich:user",
                "keystone.identity": {"tenant": ("5ad7", "Rich")},
            },
            "AUTH_rich",
        ),
    ],
)
def test_project_is_the_one_that_the_auth_middleware_established(env, account):
    assert paying_account(env, FilterConfig()) == account


def _keystone(world, project, roles, status="Confirmed"):
    """Arguments of ``send`` for a caller behind keystoneauth."""
    env = {
        "HTTP_X_IDENTITY_STATUS": status,
        "HTTP_X_PROJECT_ID": project,
        "HTTP_X_PROJECT_NAME": "Project",
        "HTTP_X_USER_ID": "77",
        "HTTP_X_USER_NAME": "joe",
        "HTTP_X_ROLES": roles,
    }
    app = keystoneauth.filter_factory({})(world.filter)
    return {"user": None, "env": env, "app": app}


@pytest.mark.parametrize(
    ("token_status", "expected"), [("Confirmed", 200), ("Invalid", 403)]
)
def test_project_of_a_validated_keystone_token_is_charged(
    world, token_status, expected
):
    world.swift.read_acls.update({DATA: ".r:*", MODELS: ".r:*"})
    caller = _keystone(world, "5ad7", "member", token_status)
    answer = world.send(headers=annotation(), **caller)

    assert answer.status == expected
    accounts = {job.charged_account for job in world.worker.jobs}
    assert accounts == ({"AUTH_5ad7"} if expected == 200 else set())


@pytest.mark.parametrize(
    ("project", "roles", "is_owner"),
    [
        ("test", "swiftoperator", True),
        ("test", "admin", True),
        ("test", "member", False),
        ("5ad7", "swiftoperator", False),
        ("5ad7", "ResellerAdmin", True),
    ],
)
def test_operators_of_the_project_own_the_account(
    world, project, roles, is_owner
):
    caller = _keystone(world, project, roles)
    path = f"/{ACCOUNT}"
    for method in ("GET", "DELETE"):
        answer = world.send(method, path, query="?hapi-cache", **caller)
        assert answer.status == (200 if is_owner else 403)
    calls = [(e["REQUEST_METHOD"], e["PATH_INFO"]) for e in world.swift.calls]
    assert ("DELETE", f"/v1{path}") not in calls


def test_charged_account_begins_with_the_reseller_prefix():
    env = {"REMOTE_USER": "rich,rich:user"}

    config = FilterConfig(reseller_prefix="KEY_")
    assert paying_account(env, config) == "KEY_rich"


def _tempurl(world, **changes):
    query = signed(world, SOURCE)
    headers = annotation(**changes)
    return world.send(headers=headers, user=None, query=query)


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


def test_tempurl_gives_no_right_on_models_in_the_signed_container(open_world):
    open_world.swift.put(f"{DATA}/net.hapi", PACKAGE)

    assert _tempurl(open_world, model=f"{DATA}/net.hapi").status == 401


def test_tempurl_does_not_reveal_that_a_private_model_exists(open_world):
    existing = _tempurl(open_world)
    missing = _tempurl(open_world, model=f"{MODELS}/none")

    assert existing.status == missing.status == 401


def test_override_that_allows_everything_gives_no_right_on_the_model(
    open_world,
):
    # The environment of a request under s3_acl.
    env = {
        "swift.source": "S3",
        "swift.authorize": lambda request: None,
        "swift.authorize_override": True,
        "swift_owner": True,
        "REMOTE_USER": "test,test:tester,AUTH_test",
    }
    answer = open_world.send(
        headers=annotation(), user=None, env=env, app=open_world.filter
    )
    assert answer.refusal == (401, "unauthorized")

    open_world.swift.read_acls[MODELS] = ".r:*"
    answer = open_world.send(
        headers=annotation(), user=None, env=env, app=open_world.filter
    )
    assert answer.status == 200
    assert open_world.worker.jobs[-1].charged_account == ".unauthenticated"


PRESIGNED = "X-Amz-Credential=test:tester/20261123/us-east-1/s3"


@pytest.mark.parametrize(
    "env",
    [
        s3_env(PRESIGNED),
        s3_env("AWSAccessKeyId=test:tester&Signature=s"),
        # An Authorization header does not count if the URL is signed.
        {
            **s3_env(f"versionId=1&{PRESIGNED}"),
            "HTTP_AUTHORIZATION": "AWS4-HMAC-SHA256 Credential=x",
        },
        # An unknown s3api.
        {"swift.source": "S3"},
        {"swift.source": "S3", "s3api.auth_details": {"signature": "s"}},
    ],
)
def test_holder_of_a_presigned_url_is_not_treated_as_its_signer(
    open_world, env
):
    answer = open_world.send(headers=annotation(), env=env)
    assert answer.refusal == (401, "unauthorized")
    assert open_world.worker.calls == []

    open_world.swift.read_acls[MODELS] = ".r:*"
    assert open_world.send(headers=annotation(), env=env).status == 200
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
    env = {
        "swift.source": "S3",
        "swift.authorize": lambda request: None,
        "swift.authorize_override": True,
    }
    answer = world.send(
        "HEAD", headers=annotation(), user=None, env=env, app=world.filter
    )

    # The ACL is in headers that an annotated HEAD would not have.
    assert answer.headers["X-Object-Meta-Colour"] == "blue"


def test_override_applies_to_the_path_of_the_source_only(open_world):
    open_world.swift.read_acls[MODELS] = ".r:*"
    _tempurl(open_world)

    for env in open_world.swift.calls:
        if env.get("swift.source") != "HP":
            continue
        inherited = env.get("swift.authorize_override", False)
        assert inherited == (env["PATH_INFO"] == f"/v1{SOURCE}")
        assert ("REMOTE_USER" in env) == inherited


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
def test_anonymous_reader_of_a_public_container_may_read_objects_only(
    method, path, admitted
):
    request = Request.blank(path, environ={"REQUEST_METHOD": method})
    request.acl = ".r:*,.rlistings"
    refusal = authorize_anonymous(request)

    assert (refusal is None) == admitted
    assert admitted or refusal.status_int == 401


def test_pipeline_of_these_tests_has_the_real_tempurl(world):
    assert isinstance(world.pipeline, tempurl.TempURL)
    unsigned = world.send(
        user=None, query="?temp_url_sig=0&temp_url_expires=9"
    )
    assert unsigned.status == 401


def test_identity_is_path_etag_and_length(world):
    world.send(headers=annotation())

    assert list(world.worker.digests) == [
        ModelIdentity(
            account=ACCOUNT,
            container="models",
            object="net.hapi",
            etag=world.swift.objects[MODEL].etag,
            length_bytes=len(PACKAGE),
        )
    ]


PRE_AUTHORISED_MODULES = ("cache/entries.py",)
"""Modules whose sub-requests may be pre-authorised."""


def test_no_subrequest_is_pre_authorised():
    """Except in the cache's own containers, the caller's right decides."""
    modules = sorted(Path(hapi_middleware.__file__).parent.rglob("*.py"))
    assert len(modules) > 5
    found = [
        f"{module.name}:{node.lineno} {name}"
        for module in modules
        if f"{module.parent.name}/{module.name}" not in PRE_AUTHORISED_MODULES
        for node in ast.walk(ast.parse(module.read_text()))
        for name in _names(node)
        if "pre_auth" in name.lower() or "preauth" in name.lower()
    ]
    assert found == []


def _names(node):
    if isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    return [node.id] if isinstance(node, ast.Name) else []
