"""Hostile packages sent through Swift, the filter and the worker."""

import pytest

import hostile
from caller import Caller, metrics
from photos import shard

ACCOUNT = "AUTH_test"
BUILDERS = (
    hostile.pickled_member,
    hostile.expression_as_size,
    hostile.guard_string,
    hostile.operator_path,
    hostile.from_file_operator,
    hostile.cut_name_injection,
    hostile.in_place_operator,
    hostile.random_operator,
    hostile.custom_operator,
    hostile.wrong_cut_shape,
    hostile.duplicate_member,
    hostile.deflated_member,
    hostile.overlapping_members,
    hostile.ten_million_nodes,
)
"""The worker tries each in a process of its own, which takes seconds; the
other holes are tried at the loader itself."""


@pytest.fixture(scope="module")
def caller(cluster):
    opened = Caller(cluster)
    opened.put(f"/{ACCOUNT}/hostile")
    opened.put(f"/{ACCOUNT}/hostile/data.tar", shard(2))
    yield opened
    opened.close()


@pytest.mark.parametrize("build", BUILDERS, ids=lambda each: each.__name__)
def test_hostile_package_is_refused_and_leaves_no_trace(
    cluster, caller, build, tmp_path
):
    before = metrics(cluster)["hapi_worker_resident_models"]
    package = build(tmp_path / "trace")
    caller.put(f"/{ACCOUNT}/hostile/{build.__name__}.hapi", package)
    answer = caller.get(
        f"/{ACCOUNT}/hostile/data.tar",
        {"X-Hapi-Model": f"hostile/{build.__name__}.hapi", "X-Hapi-Cut": "1"},
    )
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["code"] in ("bad_package", "package_too_large")
    assert not list(tmp_path.iterdir())
    assert metrics(cluster)["hapi_worker_resident_models"] == before


def test_package_under_anothers_digest_is_refused(cluster, caller):
    name = f"{'0' * 64}.hapi"
    caller.put(f"/{ACCOUNT}/hostile/{name}", hostile.valid_package())
    answer = caller.get(
        f"/{ACCOUNT}/hostile/data.tar",
        {"X-Hapi-Model": f"hostile/{name}", "X-Hapi-Cut": "1"},
    )
    assert answer.status_code == 409
    assert answer.json()["code"] == "digest_mismatch"
