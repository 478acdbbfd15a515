"""Profiles through the real proxy and worker, and who may ask for them."""

import math

import pytest

from caller import metrics
from hapi_client.model.package_store import package_name
from hapi_protocol.errors import PackageError
from hapi_protocol.profiles import ModelProfile
from hapi_splitter.numerics import numerics_tag
from jobs import store_package
from networks import small_parts

OWNER = "AUTH_test"
CONTAINER = "profiled-models"
ASKED = {"X-Hapi-Profile": "true"}
SECONDS = 60.0


@pytest.fixture(scope="module")
def frozen():
    return small_parts(seed=11).frozen


@pytest.fixture(scope="module")
def digest(connection, frozen, tmp_path_factory):
    """Digest of a package that the worker has not seen."""
    folder = tmp_path_factory.mktemp("package")
    model = store_package(connection, folder, frozen, CONTAINER)
    return model.object.removesuffix(".hapi")


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
    assert b'"__metadata__"' in plain.content
    head = owner.request("HEAD", path, ASKED)
    assert head.status_code == 200
    assert head.headers["Content-Type"].startswith("application/json")


def test_garbage_has_no_profile(cluster, owner, connection):
    path = f"/{OWNER}/{CONTAINER}/garbage.hapi"
    owner.put(f"/{OWNER}/{CONTAINER}")
    owner.put(path, b"g" * 1000)
    before = runs(cluster)
    for _ in range(2):
        answer = owner.get(path, ASKED)
        assert (answer.status_code, answer.json()["code"]) == (
            422,
            "bad_package",
        )
    with pytest.raises(PackageError):
        connection.get_profile(CONTAINER, "garbage.hapi", seconds=SECONDS)
    assert runs(cluster) == before
