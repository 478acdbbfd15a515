"""CORS headers of the filter's answers."""

import pytest
from swift.common.swob import Response

from filter_under_test import SHARD, SOURCE, annotation
from hapi_protocol.errors import make_error
from hapi_protocol.headers import REQUEST_HEADERS

ORIGIN = {"Origin": "https://app.example.com"}
EXPOSED = "etag, x-trans-id, x-object-meta-colour, x-mine"


def _allow_origin(world, origin):
    """Swift's answers on the source allow the origin."""

    def answer(request):
        if "Origin" not in request.headers:
            return None
        found = world.swift.objects[SOURCE]
        headers = {
            "Etag": found.etag,
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": EXPOSED,
            "Vary": "Origin",
        }
        return Response(request=request, headers=headers, body=found.body)

    world.swift.objects[SOURCE].on_request = answer


def _exposed(answer):
    listed = answer.headers["Access-Control-Expose-Headers"]
    return set(listed.split(", "))


@pytest.mark.parametrize("origin", ["*", ORIGIN["Origin"]])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_allowed_origin_may_see_our_headers(world, method, origin):
    _allow_origin(world, origin)
    answer = world.send(method, headers={**annotation(), **ORIGIN})

    assert answer.status == 200
    assert answer.headers["Access-Control-Allow-Origin"] == origin
    ours = {
        "x-hapi-source-etag",
        "x-hapi-cache",
        "x-hapi-worker",
        "retry-after",
    }
    assert _exposed(answer) == {"etag", "x-trans-id", "x-mine", *ours}
    vary = [*REQUEST_HEADERS, *(["Origin"] if origin != "*" else [])]
    assert answer.headers["Vary"] == ", ".join(vary)


def test_allowed_origin_may_see_features_of_many_objects(world):
    _allow_origin(world, ORIGIN["Origin"])
    many = {"query": "?hapi", "body": b"none\nshard%200.tar"}
    container = SOURCE.rpartition("/")[0]
    answer = world.send("POST", container, annotation() | ORIGIN, **many)

    assert answer.status == 200
    allowed = answer.headers["Access-Control-Allow-Origin"]
    assert allowed == ORIGIN["Origin"]


@pytest.mark.parametrize(("allowed", "sent"), [(None, ORIGIN), ("*", {})])
def test_other_requests_get_no_cors_headers(world, allowed, sent):
    if allowed:
        _allow_origin(world, allowed)
    answer = world.send(headers={**annotation(), **sent})

    assert answer.body == SHARD.upper()
    assert not [k for k in answer.headers if k.startswith("Access-Control")]


def test_refusals_after_the_read_of_the_source_have_cors_headers(world):
    _allow_origin(world, ORIGIN["Origin"])
    world.worker.refuse_job = make_error("queue_full", "full", retry_after=3)
    answer = world.send(headers={**annotation(), **ORIGIN})

    assert answer.refusal == (503, "queue_full")
    assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN["Origin"]
    assert "retry-after" in _exposed(answer)
    assert answer.headers["Vary"] == "Origin"


def test_refusals_by_swift_are_not_changed(world):
    headers = {
        "Access-Control-Allow-Origin": "*",
        "Access-Control-Expose-Headers": EXPOSED,
    }
    world.swift.objects[SOURCE].on_request = lambda request: Response(
        status=403, request=request, headers=headers
    )
    plain = world.send(headers=ORIGIN)

    assert world.send(headers={**annotation(), **ORIGIN}) == plain
