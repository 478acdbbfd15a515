"""Comparison of runs of Swift's own tests, and fetching these tests."""

import io
import tarfile
from functools import partial
from pathlib import Path

import pytest

from hapi_cluster.configs import pipeline
from hapi_cluster.settings import ClusterSettings
from swift_functional import NotRunError, runs, sdist
from swift_functional.comparison import (
    SIDES,
    Outcome,
    Result,
    compare,
    succeeded,
)
from swift_functional.layouts import (
    LAYOUTS,
    cluster_settings,
)


@pytest.fixture
def run(tmp_path):
    """Runs a file of tests on both sides; ``test.conf`` names the side."""
    folder = tmp_path / "source" / "test" / "functional"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    places = {side: tmp_path / side for side in SIDES}
    for side, place in places.items():
        place.mkdir()
        (place / "test.conf").write_text(side)

    def run_text(text, *options):
        (folder / "test_x.py").write_text(text)
        arguments = (*options, "test/functional")
        source = tmp_path / "source"
        return runs.run_side_by_side(source, places, "swift", arguments)

    return run_text


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("import nothing_of_that_name", (), "status 2:.*nothing_of_that_name"),
        ("", ("--no-such-option",), "status 4:\n.*no-such-option"),
        ("import os\ndef test_a(): os._exit(0)\n", (), "no result"),
        ("import os\ndef test_a(): os._exit(7)\n", (), "status 7"),
        ("import time\ndef test_a(): time.sleep(600)\n", (), "status -9"),
    ],
    ids=["broken", "no start", "ended", "died", "silent"],
)
def test_pytest_without_results_is_an_error(
    run, text, options, said, monkeypatch
):
    run("def test_a(): pass\n")  # its results must not count
    if "sleep" in text:
        monkeypatch.setattr(runs, "SILENCE_SECONDS", 3.0)
    with pytest.raises(NotRunError, match=f"(?s){said}"):
        run(text, *options)


# --- comparison ---


def results(*sides):
    """Results by the kinds of the tests' outcomes, without and with."""
    return {
        side: Result({t: Outcome(kind) for t, kind in kinds.items()}, 2.6)
        for side, kinds in zip(SIDES, sides, strict=True)
    }


PASSED, FAILED, ERROR = ({"a": k} for k in ("passed", "failed", "error"))
SKIPPED = {"a": "skipped"}


@pytest.mark.parametrize(
    ("first", "again", "kind"),
    [
        ((PASSED, PASSED), None, None),
        ((SKIPPED, SKIPPED), None, None),
        ((PASSED, FAILED), (PASSED, FAILED), "differing"),
        ((FAILED, PASSED), (FAILED, PASSED), "differing"),
        ((PASSED, SKIPPED), (PASSED, SKIPPED), "differing"),
        ((FAILED, ERROR), (FAILED, ERROR), "differing"),
        ((PASSED, {}), (PASSED, {}), "differing"),
        (({}, PASSED), ({}, PASSED), "differing"),
        ((PASSED, FAILED), (PASSED, PASSED), "unsteady"),
        ((PASSED, FAILED), (FAILED, FAILED), "failing"),
        ((FAILED, FAILED), None, "failing"),
        ((ERROR, ERROR), None, "failing"),
    ],
)
def test_second_outcome_decides_on_differences_and_failures(
    first, again, kind
):
    repeat = {("a",): results(*again)}.get if again else None
    found = compare(
        "plain",
        "s3api",
        results(*({"b": "passed", **kinds} for kinds in first)),
        lambda tests: repeat(tuple(tests)),
    )
    assert succeeded([found]) is (kind not in ("differing", "failing"))
    for name in ("differing", "unsteady", "failing"):
        named = name == kind or (name == "unsteady" and again == (FAILED,) * 2)
        assert getattr(found, name) == (["a"] if named else [])


# --- clusters ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_clusters_differ_in_the_filter_alone(layout):
    settings_of = partial(cluster_settings, layout)
    settings = settings_of(Path("/key"))
    sections = settings["swift_options"]["proxy-server.conf"]
    names = sections["pipeline:main"]["pipeline"].split()
    at = names.index("hapi")
    assert names[at - 1 : at + 2] == ["staticweb", "hapi", "copy"]
    more = {*names} - {*pipeline(ClusterSettings(**settings))}
    assert more == {"domain_remap", "etag-quoter", "ratelimit", "staticweb"}
    for order in (
        ("cache", "domain_remap", "listing_formats"),
        ("cache", "etag-quoter"),
        ("ratelimit", "s3api", "tempauth", "staticweb"),
    ):
        assert sorted(order, key=names.index) == list(order)
    assert all("use" in sections[f"filter:{name}"] for name in more)
    acl = {"s3_acl": LAYOUTS[layout].s3_acl}
    acl["check_bucket_owner"] = acl["s3_acl"]
    assert sections["filter:s3api"] == acl

    sections["pipeline:main"]["pipeline"] = " ".join(
        names[:at] + names[at + 1 :]
    )
    near_disks = settings["swift_options"]["object-server.conf"]
    assert "hapi_object" in near_disks["pipeline:main"]["pipeline"]
    near_disks.clear()
    key = settings["filter_options"].pop("backend_key_file")
    assert key == "/key"
    assert settings_of(None) == {**settings, "hapi_filter": False}


# --- the sdist ---

FILES = ("test/functional/x.py", "etc/proxy-server.conf-sample", "swift/x.py")


def write_archive(folder, top="swift-1.2.3", files=FILES):
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / "swift-1.2.3.tar.gz", "w:gz") as tar:
        for name in files:
            tar.addfile(tarfile.TarInfo(f"{top}/{name}"), io.BytesIO())


@pytest.mark.parametrize(
    ("top", "files", "num_bytes"),
    [
        ("swift-1.2.4", FILES, None),
        ("swift-1.2.3", FILES[1:], None),
        ("swift-1.2.3", FILES, 60),
    ],
    ids=["other version", "no tests", "damaged"],
)
def test_other_or_damaged_archive_is_refused(top, files, num_bytes, tmp_path):
    write_archive(tmp_path, top, files)
    archive = tmp_path / "swift-1.2.3.tar.gz"
    archive.write_bytes(archive.read_bytes()[:num_bytes])
    with pytest.raises(NotRunError, match="cannot be unpacked"):
        sdist.unpacked_sdist(tmp_path, "1.2.3")
    assert list(tmp_path.iterdir()) == [archive]
