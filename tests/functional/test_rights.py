"""Rights to compute, with real tempauth and the real worker."""

import pytest

from caller import Caller, metrics
from hapi_client import Connection, Credentials
from hapi_client.model.package_store import package_name, upload_package
from hapi_splitter.freezing.split_model import split
from hapi_splitter.package.writer import write_package
from networks import small_network, small_transform
from photos import shard

OWNER = "AUTH_test"
OTHER = "AUTH_test2"
COUNTERS = (
    "hapi_worker_jobs_total",
    "hapi_worker_samples_total",
    "hapi_worker_uploads_total",
    "hapi_worker_refusals_total",
    "hapi_worker_received_bytes_total",
    "hapi_worker_resident_models",
)


@pytest.fixture(scope="module")
def other(cluster):
    caller = Caller(cluster, "test2:tester2")
    yield caller
    caller.close()


@pytest.fixture(scope="module")
def digest(cluster, owner, tmp_path_factory):
    """Path of a loaded model of the owner; ``rights/data.tar`` exists."""
    parts = split(small_network(seed=7), "body", transform=small_transform())
    path = tmp_path_factory.mktemp("package") / "model.hapi"
    info = write_package(parts.frozen, path)
    credentials = Credentials.v1(cluster.auth_url, cluster.user, cluster.key)
    with Connection(credentials) as connection:
        upload_package(connection, "private-models", path, info.digest)
    owner.put(f"/{OWNER}/rights")
    owner.put(f"/{OWNER}/rights/data.tar", shard(3))
    answer = owner.get(f"/{OWNER}/rights/data.tar", owners_model(info.digest))
    assert answer.status_code == 200, answer.text
    return info.digest


def owners_model(digest):
    name = package_name(digest)
    return {
        "X-Hapi-Model": f"/{OWNER}/private-models/{name}",
        "X-Hapi-Cut": "1",
    }


def counters(cluster):
    found = metrics(cluster)
    return {
        name: value
        for name, value in found.items()
        if name.startswith(COUNTERS)
    }


def test_empty_object_named_after_anothers_model_is_refused(
    cluster, other, digest
):
    other.put(f"/{OTHER}/mine")
    other.put(f"/{OTHER}/mine/{package_name(digest)}", b"")
    other.put(f"/{OTHER}/mine/data.tar", shard(2))
    before = counters(cluster)
    answer = other.get(
        f"/{OTHER}/mine/data.tar",
        {"X-Hapi-Model": f"mine/{package_name(digest)}", "X-Hapi-Cut": "1"},
    )
    assert answer.status_code == 422
    assert answer.json()["code"] == "bad_package"
    assert counters(cluster) == before


def test_garbage_named_after_anothers_model_is_refused(cluster, other, digest):
    other.put(f"/{OTHER}/mine")
    other.put(f"/{OTHER}/mine/{package_name(digest)}", b"g" * 4096)
    other.put(f"/{OTHER}/mine/data.tar", shard(2))
    answer = other.get(
        f"/{OTHER}/mine/data.tar",
        {"X-Hapi-Model": f"mine/{package_name(digest)}", "X-Hapi-Cut": "1"},
    )
    assert answer.status_code in (409, 422)
    assert answer.json()["code"] in ("digest_mismatch", "bad_package")


@pytest.mark.parametrize(
    ("user", "source", "expected"),
    [
        ("test2:tester2", f"/{OWNER}/rights/data.tar", 403),
        ("test2:tester2", f"/{OWNER}/rights/nothing.tar", 403),
        ("test:tester3", f"/{OWNER}/rights/data.tar", 403),
        (None, f"/{OWNER}/rights/data.tar", 401),
        (None, f"/{OWNER}/rights/nothing.tar", 401),
        ("test:tester", f"/{OWNER}/rights/nothing.tar", 404),
        ("test:tester", f"/{OWNER}/nowhere/nothing.tar", 404),
    ],
)
def test_caller_without_rights_on_the_source_gets_the_plain_answer(
    cluster, digest, user, source, expected
):
    caller = Caller(cluster, user)
    before = counters(cluster)
    plain = caller.get(source)
    annotated = caller.get(source, owners_model(digest))
    caller.close()
    assert plain.status_code == expected
    assert annotated.status_code == expected
    assert annotated.content == plain.content
    assert counters(cluster) == before


@pytest.mark.parametrize("name", ["real", "missing"])
@pytest.mark.parametrize(
    ("user", "expected"), [("test2:tester2", 403), ("test:tester3", 403)]
)
def test_caller_without_rights_on_the_model_gets_the_plain_status(
    cluster, owner, digest, name, user, expected
):
    owner.put(f"/{OWNER}/open")
    owner.put(f"/{OWNER}/open/data.tar", shard(2))
    owner.request(
        "POST", f"/{OWNER}/open", {"X-Container-Read": ".r:*,.rlistings"}
    ).raise_for_status()
    model = package_name(digest) if name == "real" else "missing.hapi"
    caller = Caller(cluster, user)
    before = counters(cluster)
    plain = caller.get(f"/{OWNER}/private-models/{model}")
    annotated = caller.get(
        f"/{OWNER}/open/data.tar",
        {
            "X-Hapi-Model": f"/{OWNER}/private-models/{model}",
            "X-Hapi-Cut": "1",
        },
    )
    caller.close()
    assert plain.status_code == expected
    assert annotated.status_code == expected
    assert counters(cluster) == before


def test_reader_of_both_may_compute(cluster, owner, other, digest):
    """Read ACLs are enough, and the reader pays, not the owner."""
    for container in ("rights", "private-models"):
        owner.request(
            "POST",
            f"/{OWNER}/{container}",
            {"X-Container-Read": "test2:tester2"},
        ).raise_for_status()
    try:
        answer = other.get(f"/{OWNER}/rights/data.tar", owners_model(digest))
        assert answer.status_code == 200, answer.text
    finally:
        for container in ("rights", "private-models"):
            owner.request(
                "POST", f"/{OWNER}/{container}", {"X-Container-Read": ""}
            ).raise_for_status()
    answer = other.get(f"/{OWNER}/rights/data.tar", owners_model(digest))
    assert answer.status_code == 403


def test_anonymous_reader_may_get_and_not_compute(cluster, owner, digest):
    for container in ("rights", "private-models"):
        owner.request(
            "POST", f"/{OWNER}/{container}", {"X-Container-Read": ".r:*"}
        ).raise_for_status()
    caller = Caller(cluster, None)
    try:
        path = f"/{OWNER}/rights/data.tar"
        assert caller.get(path).status_code == 200
        answer = caller.get(path, owners_model(digest))
        assert answer.status_code == 403
        assert answer.json()["code"] == "compute_not_allowed"
    finally:
        caller.close()
        for container in ("rights", "private-models"):
            owner.request(
                "POST", f"/{OWNER}/{container}", {"X-Container-Read": ""}
            ).raise_for_status()


def test_plain_requests_are_as_without_the_filter(cluster, owner, digest):
    path = f"/{OWNER}/rights/data.tar"
    plain = owner.get(path)
    assert plain.content == shard(3)
    part = owner.get(path, {"Range": "bytes=512-1023"})
    assert part.status_code == 206
    assert part.content == plain.content[512:1024]
    not_modified = owner.get(path, {"If-None-Match": plain.headers["Etag"]})
    assert not_modified.status_code == 304
