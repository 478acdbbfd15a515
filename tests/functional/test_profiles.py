"""Profiles through the real proxy and worker, and who may ask for them."""

import math

import pytest

from caller import Caller, metrics
from hapi_client.model.package_store import package_name, upload_package
from hapi_protocol.errors import PackageError
from hapi_protocol.profiles import ModelProfile
from hapi_splitter.freezing.split_model import split
from hapi_splitter.numerics import numerics_tag
from hapi_splitter.package.writer import write_package
from networks import small_network, small_transform
from photos import shard

OWNER = "AUTH_test"
CONTAINER = "profiled-models"
ASKED = {"X-Hapi-Profile": "true"}
SECONDS = 60.0


@pytest.fixture(scope="module")
def frozen():
    network = small_network(seed=11)
    return split(network, "body", transform=small_transform()).frozen


@pytest.fixture(scope="module")
def digest(connection, frozen, tmp_path_factory):
    """Digest of a package that the worker has not seen."""
    path = tmp_path_factory.mktemp("package") / "model.hapi"
    info = write_package(frozen, path)
    upload_package(connection, CONTAINER, path, info.digest)
    return info.digest


def counters(cluster):
    return {
        name: value
        for name, value in metrics(cluster).items()
        if name.startswith("hapi_worker_")
        and "_created" not in name
        and "_allocated_bytes" not in name
    }


def runs(cluster):
    name = 'hapi_worker_profiles_total{outcome="done",reason=""}'
    return metrics(cluster).get(name, 0.0)


def test_profile_is_measured_once_and_kept(
    cluster, owner, connection, frozen, digest
):
    before = runs(cluster)
    name = package_name(digest)
    profile = connection.get_profile(CONTAINER, name, seconds=SECONDS)
    assert profile.digest == digest
    assert profile.num_cuts == frozen.num_cuts
    assert profile.device == "cpu"
    assert profile.numerics_tag == numerics_tag("cpu")
    run = frozen.to("cpu", fast=True)
    assert profile.parameter_bytes == run.parameter_bytes
    assert profile.load_seconds > 0
    assert profile.reference_seconds > 0
    for batch in profile.batches:
        assert batch.cut_seconds[0] == 0
        assert list(batch.cut_seconds) == sorted(batch.cut_seconds)
        assert 0 < batch.cut_seconds[-1] < math.inf
    again = owner.get(f"/{OWNER}/{CONTAINER}/{name}", ASKED)
    assert again.status_code == 200
    assert again.headers["Cache-Control"] == "private, no-store"
    assert ModelProfile.from_body(again.content) == profile
    assert runs(cluster) - before == 1
    known = {**ASKED, "If-None-Match": again.headers["ETag"]}
    same = owner.get(f"/{OWNER}/{CONTAINER}/{name}", known)
    assert (same.status_code, same.content) == (304, b"")
    assert runs(cluster) - before == 1


def test_package_is_still_an_object_like_any_other(owner, digest):
    path = f"/{OWNER}/{CONTAINER}/{package_name(digest)}"
    plain = owner.get(path)
    assert plain.content[:2] == b"PK"
    head = owner.request("HEAD", path, ASKED)
    assert head.status_code == 200
    assert head.headers["Content-Type"].startswith("application/json")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    ("user", "name", "expected"),
    [
        ("test2:tester2", None, 403),
        ("test2:tester2", "nothing.hapi", 403),
        ("test:tester3", None, 403),
        (None, None, 401),
        (None, "nothing.hapi", 401),
        ("test:tester", "nothing.hapi", 404),
    ],
)
def test_who_may_not_read_the_package_learns_nothing(
    cluster, digest, method, user, name, expected
):
    caller = Caller(cluster, user)
    path = f"/{OWNER}/{CONTAINER}/{name or package_name(digest)}"
    before = counters(cluster)
    plain = caller.request(method, path)
    answer = caller.request(method, path, ASKED)
    caller.close()
    assert answer.status_code == plain.status_code == expected
    assert answer.content == plain.content
    assert counters(cluster) == before


@pytest.mark.parametrize("size", [1000, 100_000])
def test_garbage_has_no_profile(cluster, owner, connection, size):
    path = f"/{OWNER}/{CONTAINER}/garbage-{size}.hapi"
    owner.put(f"/{OWNER}/{CONTAINER}")
    owner.put(path, b"g" * size)
    before = runs(cluster)
    for _ in range(2):
        answer = owner.get(path, ASKED)
        assert (answer.status_code, answer.json()["code"]) == (
            422,
            "bad_package",
        )
    with pytest.raises(PackageError):
        connection.get_profile(
            CONTAINER, f"garbage-{size}.hapi", seconds=SECONDS
        )
    assert runs(cluster) == before


def test_other_headers_are_refused(owner, digest):
    path = f"/{OWNER}/{CONTAINER}/{package_name(digest)}"
    answer = owner.get(path, {**ASKED, "X-Hapi-Cut": "1"})
    assert answer.status_code == 400
    assert "X-Hapi-Cut" in answer.json()["message"]
    part = owner.get(path, {**ASKED, "Range": "bytes=0-3"})
    assert part.json()["code"] == "range_not_allowed"


def test_shard_is_no_package(owner):
    owner.put(f"/{OWNER}/profiled-data")
    path = f"/{OWNER}/profiled-data/data.tar"
    owner.put(path, shard(2))
    assert owner.get(path, ASKED).json()["code"] == "bad_package"


def test_info_announces_profiles(connection):
    assert connection.require_hapi()["profile"] is True
