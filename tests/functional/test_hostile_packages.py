"""Hostile packages sent through Swift, the filter and the worker."""

from contextlib import closing
from urllib.parse import quote

import pytest

import hostile
from caller import Caller, metrics
from photos import shard

ACCOUNT = "AUTH_test"
NAMES = (
    "pickled header",
    "expression as size",
    "torch.hub.load",
    "cut shape",
    "overlapping tensors",
    "ten million nodes",
)
"""The other holes are tried at the loader and at the validation server."""


@pytest.fixture(scope="module")
def caller(cluster):
    opened = Caller(cluster)
    opened.put(f"/{ACCOUNT}/hostile")
    opened.put(f"/{ACCOUNT}/hostile/data.tar", shard(2))
    yield opened
    opened.close()


@pytest.mark.parametrize("name", NAMES)
def test_hostile_package_is_refused_and_leaves_no_trace(
    cluster, caller, name, tmp_path
):
    before = metrics(cluster)["hapi_worker_resident_models"]
    package = hostile.attacks()[name].build(tmp_path / "trace")
    path = f"/{ACCOUNT}/hostile/{quote(name)}.hapi"
    caller.put(path, package)
    answer = caller.get(
        f"/{ACCOUNT}/hostile/data.tar",
        {"X-Hapi-Model": path, "X-Hapi-Cut": "1"},
    )
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["code"] in ("bad_package", "package_too_large")
    assert not list(tmp_path.iterdir())
    assert metrics(cluster)["hapi_worker_resident_models"] == before


@pytest.mark.parametrize(
    ("content", "refusals"),
    [
        (b"", {(422, "bad_package")}),
        (b"g" * 4096, {(409, "digest_mismatch"), (422, "bad_package")}),
        (None, {(409, "digest_mismatch")}),
    ],
    ids=["empty", "garbage", "package"],
)
def test_other_content_under_the_digest_of_a_loaded_model_is_refused(
    cluster, caller, small_model, content, refusals
):
    model = small_model[0]
    asked = {"X-Hapi-Model": model, "X-Hapi-Cut": "1"}
    source = f"/{ACCOUNT}/hostile/data.tar"
    assert caller.get(source, asked).status_code == 200
    place = "/AUTH_test2/mine"
    with closing(Caller(cluster, "test2:tester2")) as other:
        mine = f"{place}/{model.rpartition('/')[2]}"
        other.put(place)
        other.put(
            mine, hostile.valid_package() if content is None else content
        )
        other.put(f"{place}/data.tar", shard(2))
        before = jobs_and_uploads(cluster)
        answer = other.get(
            f"{place}/data.tar", {**asked, "X-Hapi-Model": mine}
        )
    assert (answer.status_code, answer.json()["code"]) in refusals
    assert content != b"" or jobs_and_uploads(cluster) == before


def jobs_and_uploads(cluster):
    counted = ("hapi_worker_jobs_total", "hapi_worker_uploads_total")
    found = metrics(cluster)
    return {k: v for k, v in found.items() if k.startswith(counted)}
