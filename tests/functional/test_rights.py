"""Rights to compute, with real tempauth and the real worker.

What only Swift decides on is in test_filter_rights, with a stub.
"""

from contextlib import closing

import pytest

from caller import Caller, metrics
from hapi_client.model.package_store import package_name, upload_package
from hapi_splitter.freezing.split_model import split
from hapi_splitter.package.writer import write_package
from networks import small_network, small_transform
from photos import shard

OTHER = "/AUTH_test2/mine"
DATA, MODELS = "/AUTH_test/rights", "/AUTH_test/private-models"
SOURCE = f"{DATA}/data.tar"
COUNTERS = (
    "hapi_worker_jobs_total",
    "hapi_worker_samples_total",
    "hapi_worker_uploads_total",
    "hapi_worker_refusals_total",
    "hapi_worker_received_bytes_total",
    "hapi_worker_resident_models",
)


@pytest.fixture(scope="module")
def package(connection, owner, tmp_path_factory):
    """Name of a loaded model of the owner; SOURCE exists."""
    parts = split(small_network(seed=7), "body", transform=small_transform())
    path = tmp_path_factory.mktemp("package") / "model.hapi"
    info = write_package(parts.frozen, path)
    upload_package(connection, "private-models", path, info.digest)
    name = package_name(info.digest)
    owner.put(DATA)
    owner.put(SOURCE, shard(3))
    answer = owner.get(SOURCE, by_model(f"{MODELS}/{name}"))
    assert answer.status_code == 200, answer.text
    return name


def by_model(path):
    return {"X-Hapi-Model": path, "X-Hapi-Cut": "1"}


def counters(cluster):
    found = metrics(cluster)
    return {k: v for k, v in found.items() if k.startswith(COUNTERS)}


@pytest.mark.parametrize(
    ("content", "refusals"),
    [
        (b"", {(422, "bad_package")}),
        (b"g" * 4096, {(409, "digest_mismatch"), (422, "bad_package")}),
    ],
    ids=["empty", "garbage"],
)
def test_other_content_named_after_anothers_model_is_refused(
    cluster, package, content, refusals
):
    with closing(Caller(cluster, "test2:tester2")) as other:
        other.put(OTHER)
        other.put(f"{OTHER}/{package}", content)
        other.put(f"{OTHER}/data.tar", shard(2))
        before = counters(cluster)
        asked = by_model(f"{OTHER}/{package}")
        answer = other.get(f"{OTHER}/data.tar", asked)

    assert (answer.status_code, answer.json()["code"]) in refusals
    assert content or counters(cluster) == before


@pytest.mark.parametrize(
    ("user", "source", "expected"),
    [
        ("test2:tester2", SOURCE, 403),
        ("test2:tester2", f"{DATA}/nothing.tar", 403),
        ("test:tester3", SOURCE, 403),
        (None, SOURCE, 401),
        (None, f"{DATA}/nothing.tar", 401),
        ("test:tester", f"{DATA}/nothing.tar", 404),
        ("test:tester", "/AUTH_test/nowhere/nothing.tar", 404),
    ],
)
def test_caller_without_rights_on_the_source_gets_the_plain_answer(
    cluster, package, user, source, expected
):
    before = counters(cluster)
    with closing(Caller(cluster, user)) as caller:
        for method in ("GET", "HEAD"):
            plain = caller.request(method, source)
            asked = by_model(f"{MODELS}/{package}")
            answer = caller.request(method, source, asked)
            assert answer.status_code == plain.status_code == expected
            assert answer.content == plain.content
    assert counters(cluster) == before


def test_anonymous_reader_may_get_and_not_compute(cluster, owner, package):
    for path in (DATA, MODELS):
        owner.put(path, headers={"X-Container-Read": ".r:*"})
    with closing(Caller(cluster, None)) as caller:
        plain = caller.get(SOURCE)
        answer = caller.get(SOURCE, by_model(f"{MODELS}/{package}"))
    for path in (DATA, MODELS):
        owner.put(path, headers={"X-Container-Read": ""})

    assert plain.status_code == 200
    assert answer.status_code == 403
    assert answer.json()["code"] == "compute_not_allowed"
