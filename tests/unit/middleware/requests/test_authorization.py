"""Who may compute what, judged by Swift's own auth middleware."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

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
    Answer,
    FilterUnderTest,
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


def _same(answer: Answer, plain: Answer) -> bool:
    return (answer.status, answer.body) == (plain.status, plain.body)


# --- the source -----------------------------------------------------------


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
    world: FilterUnderTest,
    method: str,
    user: str | None,
    path: str,
    status: int,
) -> None:
    plain = world.send(method, path, user=user)
    answer = world.send(method, path, annotation(), user=user)

    assert plain.status == status
    assert _same(answer, plain)
    assert answer.headers == plain.headers
    assert world.worker.calls == []


def test_reader_by_acl_may_compute(world: FilterUnderTest) -> None:
    world.swift.read_acls.update({DATA: TESTER3, MODELS: TESTER3})

    assert world.send(headers=annotation(), user=TESTER3).status == 200


def test_reader_of_another_account_pays_itself(
    world: FilterUnderTest,
) -> None:
    world.swift.read_acls.update({DATA: TESTER2, MODELS: TESTER2})
    headers = annotation(model=MODEL)

    assert world.send(headers=headers, user=TESTER2).status == 200
    assert world.worker.jobs[-1].charged_account == OTHER


# --- the model ------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_unreadable_model_is_refused_and_named(
    world: FilterUnderTest, method: str
) -> None:
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


def test_model_of_another_account_needs_its_acl(
    world: FilterUnderTest,
) -> None:
    model = f"/{OTHER}/models/net.hapi"
    world.swift.put(model, PACKAGE)
    headers = annotation(model=model)

    assert world.send(headers=headers).status == 403
    world.swift.read_acls[f"/{OTHER}/models"] = "test:tester"
    assert world.send(headers=headers).status == 200


def test_missing_model_is_told_only_to_those_who_may_know(
    world: FilterUnderTest,
) -> None:
    world.swift.read_acls[DATA] = TESTER3
    headers = annotation(model="/AUTH_test/models/none")

    owner = world.send(headers=headers)
    stranger = world.send(headers=headers, user=TESTER3)

    assert owner.refusal == (404, "not_found")
    assert stranger.refusal == (403, "forbidden")


def test_anonymous_without_right_on_the_model_gets_401(
    open_world: FilterUnderTest,
) -> None:
    open_world.swift.read_acls[DATA] = ".r:*"
    answer = open_world.send(headers=annotation(), user=None)

    assert answer.refusal == (401, "unauthorized")
    assert "Www-Authenticate" in answer.headers


def test_source_right_is_judged_before_the_model(
    world: FilterUnderTest,
) -> None:
    headers = annotation(model="/AUTH_test/models/none")
    answer = world.send(path=f"{DATA}/none", headers=headers)

    assert answer.status == 404
    assert answer.headers["Content-Type"].startswith("text/html")
    assert [r[1] for r in world.swift.requests()] == [f"/v1{DATA}/none"] * 2


def test_failing_swift_is_no_verdict_on_the_model(
    world: FilterUnderTest,
) -> None:
    world.swift.objects[MODEL].on_request = lambda request: Response(
        status=503, request=request
    )
    answer = world.send(headers=annotation())

    assert answer.refusal == (503, "service_unavailable")
    assert answer.headers["Retry-After"] == "1"


def test_odd_refusal_of_the_model_is_a_bad_model(
    world: FilterUnderTest,
) -> None:
    world.swift.objects[MODEL].on_request = lambda request: Response(
        status=412, request=request
    )
    answer = world.send(headers=annotation())

    assert answer.refusal == (400, "bad_model")


# --- identity: bytes, not names -------------------------------------------


def test_resident_model_needs_the_right_all_the_same(
    world: FilterUnderTest,
) -> None:
    world.send(headers=annotation())
    calls = len(world.worker.calls)
    world.swift.read_acls[DATA] = TESTER3

    assert world.send(headers=annotation(), user=TESTER3).status == 403
    assert len(world.worker.calls) == calls


@pytest.mark.parametrize("body", [b"", b"P" * 21])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_empty_object_named_as_a_resident_model_is_refused_here(
    world: FilterUnderTest, body: bytes, method: str
) -> None:
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
def test_manifest_as_a_package_is_refused(
    world: FilterUnderTest, header: str
) -> None:
    world.swift.put(MODEL, PACKAGE, **{header: "True"})
    answer = world.send(headers=annotation())

    assert answer.refusal == (422, "package_is_manifest")
    assert world.worker.calls == []


def test_model_changed_between_head_and_get_is_identified_anew(
    world: FilterUnderTest,
) -> None:
    second = PACKAGE + b"!"

    world.swift.may_be_unread = True
    swapped = []

    def swap(request: Request) -> Response | None:
        if request.method == "GET" and not swapped:
            swapped.append(True)
            world.swift.put(MODEL, second)
            fresh = world.swift.objects[MODEL]
            return Response(
                request=request,
                body=fresh.body,
                headers={"Etag": fresh.etag},
            )
        return None

    world.swift.objects[MODEL].on_request = swap
    answer = world.send(headers=annotation())

    assert answer.status == 200
    (identity,) = world.worker.digests
    assert identity.length_bytes == len(second)
    assert world.worker.jobs[-1].model == identity
    assert world.worker.jobs[-1].model != world.worker.jobs[0].model


def test_model_that_keeps_changing_is_refused(world: FilterUnderTest) -> None:
    def always_another(request: Request) -> Response | None:
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


def test_package_right_lost_before_its_get_is_a_refusal(
    world: FilterUnderTest,
) -> None:
    world.swift.objects[MODEL].on_request = lambda request: (
        Response(status=403, request=request)
        if request.method == "GET"
        else None
    )
    answer = world.send(headers=annotation())

    assert answer.refusal == (403, "forbidden")


# --- who pays -------------------------------------------------------------


def test_admin_and_member_of_an_account_are_one_payer(
    world: FilterUnderTest,
) -> None:
    world.swift.read_acls.update({DATA: TESTER3, MODELS: TESTER3})
    world.send(headers=annotation())
    world.send(headers=annotation(), user=TESTER3)

    accounts = {job.charged_account for job in world.worker.jobs}
    assert accounts == {ACCOUNT}


def test_anonymous_compute_is_refused_by_default(
    world: FilterUnderTest,
) -> None:
    world.swift.read_acls.update({DATA: ".r:*", MODELS: ".r:*"})
    answer = world.send(headers=annotation(), user=None)

    assert answer.refusal == (403, "compute_not_allowed")
    assert world.worker.calls == []


# --- who of those may compute ---------------------------------------------


def _shared(world: FilterUnderTest) -> FilterUnderTest:
    """Both objects may be read by everybody, with and without a token."""
    acl = f"{TESTER2},.r:*"
    world.swift.read_acls.update({DATA: acl, MODELS: acl})
    return world


ASKED = {
    "features": (SOURCE, annotation()),
    "index": (SOURCE, {"X-Hapi-Index": "true"}),
    "profile": (MODEL, {"X-Hapi-Profile": "true"}),
}


@pytest.mark.parametrize("kind", ASKED)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_account_that_is_not_listed_computes_nothing(
    tmp_path: Path, kind: str, method: str
) -> None:
    path, headers = ASKED[kind]
    options = {"allowed_accounts": f"{OTHER}, AUTH_more"}
    with filter_and_worker(tmp_path, **options) as world:
        refused = _shared(world).send(method, path, headers)
        assert refused.status == 403
        assert world.worker.calls == []
        if method == "GET":
            assert refused.json["code"] == "compute_not_allowed"
            assert ACCOUNT in refused.json["message"]
            assert OTHER not in refused.json["message"]
            # It is the caller who counts, not the owner of the data.
            found = world.send(method, path, headers, user=TESTER2)
            assert found.status == 200
        assert world.send(method, path).status == 200


def test_unreadable_object_is_answered_as_ever_to_an_account_not_listed(
    tmp_path: Path,
) -> None:
    with filter_and_worker(tmp_path, allowed_accounts="AUTH_more") as world:
        plain = world.send(user=TESTER2)
        answer = world.send(headers=annotation(), user=TESTER2)
        assert (plain.status, answer.status) == (403, 403)
        assert _same(answer, plain)


def test_callers_without_a_project_need_no_listing(tmp_path: Path) -> None:
    options = {
        "allowed_accounts": OTHER,
        "allow_unauthenticated_compute": "yes",
    }
    with filter_and_worker(tmp_path, **options) as world:
        answer = _shared(world).send(headers=annotation(), user=None)
        assert answer.status == 200


def test_list_of_accounts_admits_nobody_without_a_project(
    tmp_path: Path,
) -> None:
    with filter_and_worker(tmp_path, allowed_accounts=OTHER) as world:
        answer = _shared(world).send(headers=annotation(), user=None)
        assert answer.json["code"] == "compute_not_allowed"


def test_info_tells_nothing_of_the_accounts(tmp_path: Path) -> None:
    with filter_and_worker(tmp_path, allowed_accounts=OTHER):
        found = repr(get_swift_info(admin=True))
    assert OTHER not in found
    assert "allowed_accounts" not in found


def test_anonymous_compute_is_charged_to_a_class_of_its_own(
    open_world: FilterUnderTest,
) -> None:
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
def test_no_project_is_found_where_none_is_proved(
    env: dict[str, Any],
) -> None:
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
def test_project_is_what_the_auth_middleware_found(
    env: dict[str, Any], account: str
) -> None:
    assert paying_account(env, FilterConfig()) == account


@pytest.mark.parametrize(
    ("status", "answered"), [("Confirmed", 200), ("Invalid", 403)]
)
def test_project_that_keystone_confirmed_pays(
    world: FilterUnderTest, status: str, answered: int
) -> None:
    world.swift.read_acls.update({DATA: ".r:*", MODELS: ".r:*"})
    env = {
        "HTTP_X_IDENTITY_STATUS": status,
        "HTTP_X_PROJECT_ID": "5ad7",
        "HTTP_X_PROJECT_NAME": "Rich",
        "HTTP_X_USER_ID": "77",
        "HTTP_X_USER_NAME": "joe",
        "HTTP_X_ROLES": "member",
    }
    app = keystoneauth.filter_factory({})(world.filter)
    answer = world.send(headers=annotation(), user=None, env=env, app=app)

    assert answer.status == answered
    accounts = [job.charged_account for job in world.worker.jobs]
    assert set(accounts) == ({"AUTH_5ad7"} if answered == 200 else set())


@pytest.mark.parametrize(
    ("project", "roles", "owns"),
    [
        ("test", "swiftoperator", True),
        ("test", "admin", True),
        ("test", "member", False),
        ("5ad7", "swiftoperator", False),
        ("5ad7", "ResellerAdmin", True),
    ],
)
def test_operators_of_the_project_own_the_account(
    world: FilterUnderTest, project: str, roles: str, owns: bool
) -> None:
    env = {
        "HTTP_X_IDENTITY_STATUS": "Confirmed",
        "HTTP_X_PROJECT_ID": project,
        "HTTP_X_PROJECT_NAME": "Project",
        "HTTP_X_USER_ID": "77",
        "HTTP_X_USER_NAME": "joe",
        "HTTP_X_ROLES": roles,
    }
    app = keystoneauth.filter_factory({})(world.filter)
    path = f"/{ACCOUNT}"
    answer = world.send(
        path=path, user=None, env=env, app=app, query="?hapi-cache"
    )
    assert answer.status == (200 if owns else 403)
    delete = world.send(
        "DELETE", path, user=None, env=env, app=app, query="?hapi-cache"
    )
    assert delete.status == (200 if owns else 403)
    found = [(e["REQUEST_METHOD"], e["PATH_INFO"]) for e in world.swift.calls]
    assert ("DELETE", f"/v1{path}") not in found


def test_prefix_of_the_charged_account_is_the_operators() -> None:
    env = {"REMOTE_USER": "rich,rich:user"}

    config = FilterConfig(reseller_prefix="KEY_")
    assert paying_account(env, config) == "KEY_rich"


# --- temporary URLs and other overrides -----------------------------------


def _tempurl(world: FilterUnderTest, **changes: str | None) -> Answer:
    query = signed(world, SOURCE)
    headers = annotation(**changes)
    return world.send(headers=headers, user=None, query=query)


def test_tempurl_itself_works_and_is_refused_compute(
    world: FilterUnderTest,
) -> None:
    world.swift.read_acls[MODELS] = ".r:*"
    query = signed(world, SOURCE)

    assert world.send(user=None, query=query).body == SHARD
    answer = world.send(headers=annotation(), user=None, query=query)
    assert answer.refusal == (403, "compute_not_allowed")
    assert world.worker.calls == []


def test_tempurl_with_a_public_model_computes_unauthenticated(
    open_world: FilterUnderTest,
) -> None:
    open_world.swift.read_acls[MODELS] = ".r:*"

    assert _tempurl(open_world).body == SHARD.upper()
    assert open_world.worker.jobs[-1].charged_account == ".unauthenticated"


@pytest.mark.parametrize(
    "acl",
    ["", "test:tester", ".rlistings", ".r:example.com", ".r:*,.r:-unknown"],
)
def test_tempurl_does_not_open_private_models(
    open_world: FilterUnderTest, acl: str
) -> None:
    # TempURL's own authorize would admit any object of the account.
    open_world.swift.read_acls[MODELS] = acl

    answer = _tempurl(open_world)

    assert answer.refusal == (401, "unauthorized")
    assert open_world.worker.calls == []


def test_tempurl_does_not_open_the_signed_container_either(
    open_world: FilterUnderTest,
) -> None:
    open_world.swift.put(f"{DATA}/net.hapi", PACKAGE)

    assert _tempurl(open_world, model=f"{DATA}/net.hapi").status == 401


def test_tempurl_does_not_tell_whether_a_private_model_exists(
    open_world: FilterUnderTest,
) -> None:
    existing = _tempurl(open_world)
    missing = _tempurl(open_world, model=f"{MODELS}/none")

    assert existing.status == missing.status == 401


def test_override_with_consent_to_all_opens_nothing(
    open_world: FilterUnderTest,
) -> None:
    # What s3_acl puts into a request.
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
        # An Authorization header does not count beside it.
        {
            **s3_env(f"versionId=1&{PRESIGNED}"),
            "HTTP_AUTHORIZATION": "AWS4-HMAC-SHA256 Credential=x",
        },
        # Some other s3api.
        {"swift.source": "S3"},
        {"swift.source": "S3", "s3api.auth_details": {"signature": "s"}},
    ],
)
def test_holder_of_a_presigned_url_is_not_its_signer(
    open_world: FilterUnderTest, env: dict[str, Any]
) -> None:
    answer = open_world.send(headers=annotation(), env=env)
    assert answer.refusal == (401, "unauthorized")
    assert open_world.worker.calls == []

    open_world.swift.read_acls[MODELS] = ".r:*"
    assert open_world.send(headers=annotation(), env=env).status == 200
    assert open_world.worker.jobs[-1].charged_account == ".unauthenticated"


@pytest.mark.parametrize(("query", "owns"), [("", True), (PRESIGNED, False)])
def test_holder_of_a_presigned_url_owns_no_account(
    query: str, owns: bool
) -> None:
    def authorize(request: Request) -> None:
        request.environ["swift_owner"] = True

    env = Request.blank(f"/v1{SOURCE}", environ=s3_env(query)).environ
    env["swift.authorize"] = authorize

    assert is_owner(env, ACCOUNT) == owns


def test_s3_caller_that_signs_its_request_is_itself(
    world: FilterUnderTest,
) -> None:
    env = s3_env("versionId=1")
    assert world.send(headers=annotation(), env=env).status == 200
    assert world.worker.jobs[-1].charged_account == ACCOUNT


def test_acl_probe_of_s3api_is_left_alone(world: FilterUnderTest) -> None:
    env = {
        "swift.source": "S3",
        "swift.authorize": lambda request: None,
        "swift.authorize_override": True,
    }
    answer = world.send(
        "HEAD", headers=annotation(), user=None, env=env, app=world.filter
    )

    # Its ACL is in headers that an annotated HEAD does not have.
    assert answer.headers["X-Object-Meta-Colour"] == "blue"


def test_override_reads_the_source_at_its_own_path_only(
    open_world: FilterUnderTest,
) -> None:
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
def test_anonymous_reader_of_a_public_container_reads_objects_only(
    method: str, path: str, admitted: bool
) -> None:
    request = Request.blank(path, environ={"REQUEST_METHOD": method})
    request.acl = ".r:*,.rlistings"
    refusal = authorize_anonymous(request)

    assert (refusal is None) == admitted
    assert admitted or refusal.status_int == 401


def test_pipeline_of_these_tests_has_the_real_tempurl(
    world: FilterUnderTest,
) -> None:
    assert isinstance(world.pipeline, tempurl.TempURL)
    unsigned = world.send(
        user=None, query="?temp_url_sig=0&temp_url_expires=9"
    )
    assert unsigned.status == 401


def test_identity_is_path_etag_and_length(world: FilterUnderTest) -> None:
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


MAY_SPEAK_FOR_SWIFT = ("cache/entries.py",)
"""Modules whose sub-requests may be authorised beforehand."""


def test_no_request_is_authorised_beforehand() -> None:
    """But for a cache's own containers, every byte is read by the caller's
    right."""
    modules = sorted(Path(hapi_middleware.__file__).parent.rglob("*.py"))
    assert len(modules) > 5
    found = [
        f"{module.name}:{node.lineno} {name}"
        for module in modules
        if f"{module.parent.name}/{module.name}" not in MAY_SPEAK_FOR_SWIFT
        for node in ast.walk(ast.parse(module.read_text()))
        for name in _names(node)
        if "pre_auth" in name.lower() or "preauth" in name.lower()
    ]
    assert found == []


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    return [node.id] if isinstance(node, ast.Name) else []
