"""``X-Hapi-Profile`` between Swift's auth middleware and a stub worker."""

import pytest

from filter_under_test import ACCOUNT, MODEL, PACKAGE, SOURCE, s3_env
from hapi_protocol.errors import CODES, make_error
from hapi_protocol.headers import HEADER_SOURCE_ETAG
from hapi_protocol.profiles import ModelProfile
from stub_worker import stub_profile

ASKED = {"X-Hapi-Profile": "true"}
MODELS = f"/{ACCOUNT}/models"
TESTER3 = "test:tester3"
TESTER2 = "test2:tester2"


def posted(world):
    return [path for method, path in world.worker.calls if method == "POST"]


def etag_of(answer):
    """The ETag, with its name in any case."""
    found = {name.lower(): value for name, value in answer.headers.items()}
    return found.get("etag")


def by_tempurl(world):
    """The answer to a request as tempurl passes it on."""
    env = {
        "swift.authorize": lambda request: None,
        "swift.authorize_override": True,
        "REMOTE_USER": ".wsgi.tempurl",
    }
    return world.send(path=MODEL, headers=ASKED, user=None, env=env)


def test_owner_gets_the_profile_of_the_package(world):
    answer = world.send(path=MODEL, headers=ASKED)
    assert answer.status == 200
    profile = ModelProfile.from_body(answer.body)
    [digest] = world.worker.digests.values()
    assert profile == stub_profile(digest, world.worker.num_cuts)
    assert answer.headers["Content-Type"].startswith("application/json")
    assert answer.headers["Cache-Control"] == "private, no-store"
    assert etag_of(answer).startswith('W/"')
    etag = world.swift.objects[MODEL].etag
    assert answer.headers[HEADER_SOURCE_ETAG] == etag
    assert "Last-Modified" not in answer.headers
    # The package is uploaded once.
    assert world.send(path=MODEL, headers=ASKED).status == 200
    assert world.worker.calls.count(("PUT", "/models")) == 1
    assert posted(world) == ["/profiles"] * 3
    charged = [each.charged_account for each in world.worker.profiles]
    assert charged == [ACCOUNT] * 3


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    ("user", "path", "status"),
    [
        (None, MODEL, 401),
        (None, f"{MODELS}/none", 401),
        (TESTER3, MODEL, 403),
        (TESTER2, MODEL, 403),
        (TESTER2, f"{MODELS}/none", 403),
        ("test:tester", f"{MODELS}/none", 404),
    ],
)
def test_unreadable_package_is_answered_as_swift_does(
    world, method, user, path, status
):
    # The worker has the model, which nobody else may learn.
    assert world.send(path=MODEL, headers=ASKED).status == 200
    world.worker.calls.clear()
    plain = world.send(method, path, user=user)

    assert plain.status == status
    assert world.send(method, path, ASKED, user=user) == plain
    assert world.worker.calls == []


def test_caller_without_a_project_may_not_compute(world):
    world.swift.read_acls[MODELS] = ".r:*"
    assert world.send(path=MODEL, user=None).status == 200
    answer = world.send(path=MODEL, headers=ASKED, user=None)
    assert answer.refusal == (403, "compute_not_allowed")
    assert by_tempurl(world).json["code"] == "compute_not_allowed"
    assert world.worker.calls == []


def test_caller_without_a_project_computes_if_that_is_allowed(open_world):
    # The package is the request's own path, so its right is enough.
    assert by_tempurl(open_world).status == 200
    open_world.swift.read_acls[MODELS] = ".r:*"
    assert open_world.send("GET", MODEL, ASKED, user=None).status == 200
    charged = {each.charged_account for each in open_world.worker.profiles}
    assert charged == {".unauthenticated"}


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Hapi-Cut": "3"},
        {"X-Hapi-Model": MODEL, "X-Hapi-Encoding": "float32"},
        {"X-Hapi-Index": "true"},
        {"X-Hapi-If-Source-Etag": "e"},
    ],
)
def test_additional_headers_are_refused_by_name(world, headers):
    answer = world.send(path=MODEL, headers={**ASKED, **headers})
    assert answer.refusal == (400, "bad_annotation")
    assert answer.json["headers"] == sorted(headers)
    assert world.swift.requests() == world.worker.calls == []


@pytest.mark.parametrize(
    ("code", "sent"),
    [
        ("bad_annotation", {"headers": {"X-Hapi-Profile": "yes"}}),
        ("bad_model", {"headers": {"X-Hapi-Profile": "false"}}),
        ("bad_annotation", {"path": MODELS}),
        ("range_not_allowed", {"headers": {**ASKED, "Range": "bytes=0-9"}}),
        ("conditional_not_allowed", {"headers": {**ASKED, "If-Match": "x"}}),
        ("manifest_not_allowed", {"query": "?multipart-manifest=get"}),
        ("range_not_allowed", {"query": "?part-number=1"}),
    ],
)
def test_wrong_request_is_refused_first(world, code, sent):
    answer = world.send(**{"path": MODEL, "headers": ASKED, **sent})
    assert answer.refusal == (400, code)
    assert world.swift.requests() == []


def test_head_computes_nothing(world):
    before = world.send("HEAD", MODEL, ASKED)
    assert (before.status, before.body) == (200, b"")
    assert etag_of(before) is None
    etag = etag_of(world.send(path=MODEL, headers=ASKED))
    assert etag
    computed = len(world.worker.profiles)
    after = world.send("HEAD", MODEL, ASKED)
    assert etag_of(after) == etag
    assert "Content-Length" not in after.headers
    assert len(world.worker.profiles) == computed


def test_profile_with_a_known_etag_is_not_sent_again(world):
    etag = etag_of(world.send(path=MODEL, headers=ASKED))
    computed = len(world.worker.profiles)
    known = {**ASKED, "If-None-Match": f'"other", {etag}'}
    answer = world.send(path=MODEL, headers=known)
    assert (answer.status, answer.body) == (304, b"")
    assert len(world.worker.profiles) == computed
    # Another host of the same kind has to measure first.
    world.worker.digests.clear()
    answer = world.send(path=MODEL, headers=known)
    assert (answer.status, answer.body) == (304, b"")
    stale = {**ASKED, "If-None-Match": '"other"'}
    assert world.send(path=MODEL, headers=stale).status == 200
    world.swift.put(MODEL, PACKAGE + b"newer")
    assert world.send(path=MODEL, headers=known).status == 200


@pytest.mark.parametrize(
    ("code", "retry_after", "s3_status"),
    [("queue_full", "5", 503), ("does_not_fit", None, 400)],
)
def test_workers_refusal_is_reported(world, code, retry_after, s3_status):
    seconds = None if retry_after is None else int(retry_after)
    world.worker.refuse_profile = make_error(code, "no", retry_after=seconds)
    answer = world.send(path=MODEL, headers=ASKED)
    assert answer.refusal == (CODES[code], code)
    assert answer.json["trans_id"] == "tx1"
    assert answer.headers.get("Retry-After") == retry_after
    s3_answer = world.send(path=MODEL, headers=ASKED, env=s3_env())
    assert s3_answer.refusal == (s3_status, code)


def test_profile_is_in_the_access_log(world):
    request = world.request(path=MODEL, headers=ASKED)
    assert request.get_response(world.pipeline).body
    entry = f"hapi:profile=true;account={ACCOUNT}"
    assert request.environ["swift.log_info"] == [entry]


def test_headers_never_pass_the_filter(world):
    world.send(path=MODEL, headers=ASKED)
    world.send("PUT", SOURCE, ASKED)
    passed = [key for env in world.swift.calls for key in env]
    assert not [key for key in passed if key.startswith("HTTP_X_HAPI")]


def test_malformed_answer_is_an_internal_error(world, monkeypatch):
    monkeypatch.setattr(ModelProfile, "to_body", lambda self: b"{}")
    answer = world.send(path=MODEL, headers=ASKED)
    assert answer.refusal == (500, "internal")


def test_package_over_the_limit_is_refused(world):
    world.configure(max_package_bytes=100)
    answer = world.send(path=MODEL, headers=ASKED)
    assert answer.refusal == (413, "package_too_large")
    assert world.worker.calls == []
