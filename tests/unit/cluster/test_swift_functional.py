"""Comparison of runs of Swift's own tests, and fetching these tests."""

from __future__ import annotations

import configparser
import io
import sys
import tarfile
from pathlib import Path

import pytest

from hapi_cluster.configs import pipeline
from hapi_cluster.settings import ClusterSettings
from hapi_middleware.config import FilterConfig
from swift_functional import sdist
from swift_functional.comparison import (
    SIDES,
    compare,
    remarks,
    succeeded,
    table,
    to_json,
)
from swift_functional.errors import NotRunError
from swift_functional.layouts import (
    FILTER_OPTIONS,
    LAYOUTS,
    cluster_settings,
    config_of_tests,
)
from swift_functional.outcomes import Outcome, Record, counts
from swift_functional.progress import Progress, describe
from swift_functional.runs import Result

PHASES = ("setup", "call", "teardown")


def record_of(**tests):
    """A record of tests by the outcomes of their phases."""
    record = Record()
    record.take({"selected": list(tests)})
    for test, phases in tests.items():
        for phase, outcome in zip(PHASES, phases, strict=False):
            reason = "" if outcome == "passed" else f"why {phase}"
            record.take(
                {
                    "test": test,
                    "phase": phase,
                    "outcome": outcome,
                    "reason": reason,
                }
            )
    return record


def results(without, with_filter):
    """Results by the kinds of the tests' outcomes."""
    return {
        side: Result({t: Outcome(kind) for t, kind in kinds.items()}, 2.6)
        for side, kinds in zip(SIDES, (without, with_filter), strict=True)
    }


def compared(
    without,
    with_filter,
    again=None,
):
    def repeat(tests):
        assert again is not None, tests
        assert sorted(tests) == sorted(
            {*again[SIDES[0]].outcomes, *again[SIDES[1]].outcomes}
        )
        return again

    return compare("plain", "swift", results(without, with_filter), repeat)


# -- outcomes ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("phases", "outcome"),
    [
        (("passed", "passed", "passed"), Outcome("passed")),
        (("passed", "failed", "passed"), Outcome("failed", "why call")),
        (("failed", "passed"), Outcome("unfinished")),
        (("passed", "passed", "failed"), Outcome("error", "why teardown")),
        (("passed", "failed", "failed"), Outcome("failed", "why call")),
        (("passed", "skipped", "passed"), Outcome("skipped", "why call")),
        (("passed", "xfailed", "passed"), Outcome("xfailed", "why call")),
        (("passed", "passed"), Outcome("unfinished")),
        ((), Outcome("unfinished")),
    ],
)
def test_the_worst_phase_of_a_test_counts(phases, outcome):
    assert record_of(t=phases).outcomes() == {"t": outcome}


def test_a_failed_subtest_fails_its_test():
    record = Record()
    record.take({"selected": ["t"]})
    for phase, outcome in (
        ("setup", "passed"),
        ("call", "passed"),
        ("call", "failed"),
        ("call", "passed"),
        ("teardown", "passed"),
    ):
        event = {"test": "t", "phase": phase, "outcome": outcome}
        record.take({**event, "reason": "r"})
    assert record.outcomes()["t"].kind == "failed"


def test_progress_counts_what_has_ended_and_failed():
    record = record_of(
        a=("passed", "passed", "passed"),
        b=("passed", "failed", "passed"),
        c=("passed", "failed"),
        d=(),
    )
    assert describe("plain, swift", {"with": record}) == (
        "plain, swift: with the filter 2 of 4 tests (1 failed)"
    )


def test_progress_is_a_line_from_time_to_time_without_a_terminal(
    monkeypatch,
):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    stream = io.StringIO()
    progress = Progress("s3api", stream)
    for now in (101.0, 114.9, 115.0, 116.0):  # noqa: B007
        progress.show({"with": record_of(a=())})
    progress.done()
    assert stream.getvalue() == "s3api: with the filter 0 of 1 tests\n"


# -- comparison -------------------------------------------------------------


def test_equal_outcomes_are_no_difference():
    same = {"a": "passed", "b": "skipped", "c": "xfailed"}
    comparison = compared(same, same)
    assert succeeded([comparison])
    assert remarks([comparison]) == []
    assert comparison.again == {}


@pytest.mark.parametrize(
    ("without", "with_filter"),
    [
        ({"a": "passed"}, {"a": "failed"}),
        ({"a": "failed"}, {"a": "passed"}),
        ({"a": "passed"}, {"a": "skipped"}),
        ({"a": "failed"}, {"a": "error"}),
        ({"a": "passed"}, {"a": "unfinished"}),
        ({"a": "passed"}, {}),
        ({}, {"a": "passed"}),
    ],
)
def test_each_difference_is_named_with_both_outcomes(without, with_filter):
    same = {"b": "passed"}
    comparison = compared(
        {**same, **without},
        {**same, **with_filter},
        again=results(without, with_filter),
    )
    assert not succeeded([comparison])
    outcomes = [
        f"without: {without.get('a', 'absent')}",
        f"with:    {with_filter.get('a', 'absent')}",
    ]
    assert remarks([comparison]) == [
        "plain, a differs",
        *(f"    {outcome}" for outcome in outcomes),
        *(f"    alone, {outcome}" for outcome in outcomes),
    ]
    assert to_json(comparison)["differing"] == ["a"]


def test_second_outcome_of_a_test_that_differs_counts():
    comparison = compared(
        {"a": "passed", "b": "passed"},
        {"a": "failed", "b": "passed"},
        again=results({"a": "passed"}, {"a": "passed"}),
    )
    assert succeeded([comparison])
    assert remarks([comparison]) == [
        "plain, a differed at first, but not alone",
        "    without: passed",
        "    with:    failed",
        "    alone, without: passed",
        "    alone, with:    passed",
    ]
    body = to_json(comparison)
    assert body["unsteady"] == ["a"]
    assert body["differing"] == body["failing"] == []
    assert body["tests"]["a"]["with"] == {"kind": "failed", "reason": ""}
    assert body["again"]["a"]["with"] == {"kind": "passed", "reason": ""}
    assert body["counts"]["with"]["failed"] == 1


def test_test_that_differs_and_then_fails_on_both_sides_is_a_failure():
    comparison = compared(
        {"a": "passed"},
        {"a": "failed"},
        again=results({"a": "failed"}, {"a": "failed"}),
    )
    assert not succeeded([comparison])
    assert list(comparison.failing) == ["a"]


def test_failure_on_both_sides_is_reported():
    same = {"a": "failed", "b": "passed"}
    comparison = compared(same, same)
    assert not succeeded([comparison])
    assert remarks([comparison]) == [
        "plain, a fails without the filter as well",
        "    without: failed",
        "    with:    failed",
    ]
    assert to_json(comparison)["failing"] == ["a"]


def test_the_table_has_a_row_for_each_run():
    comparison = compared(
        {"a": "passed", "b": "skipped"}, {"a": "passed", "b": "skipped"}
    )
    lines = table([comparison]).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["plain", "swift", "without", "1", "1", "0", "0", "0", "0", "3"],
        ["plain", "swift", "with", "1", "1", "0", "0", "0", "0", "3"],
    ]
    assert len({len(line) for line in lines}) == 1


def test_counts_name_every_kind():
    outcomes = {"a": Outcome("passed"), "b": Outcome("error")}
    assert counts(outcomes) == {
        "passed": 1,
        "skipped": 0,
        "xfailed": 0,
        "error": 1,
        "failed": 0,
        "unfinished": 0,
    }


# -- clusters ---------------------------------------------------------------


def pipelines(layout):
    """The pipelines without and with the filter."""
    return [
        cluster_settings(layout, hapi_filter=with_filter)["swift_options"][
            "proxy-server.conf"
        ]["pipeline:main"]["pipeline"].split()
        for with_filter in (False, True)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_clusters_differ_in_the_filter_alone(layout):
    without, with_filter = pipelines(layout)
    at = with_filter.index("hapi")
    assert with_filter[at - 1 : at + 2] == ["staticweb", "hapi", "copy"]
    del with_filter[at]
    assert without == with_filter


@pytest.mark.parametrize("layout", LAYOUTS)
def test_additional_filters_have_their_positions_and_sections(
    layout,
):
    settings = cluster_settings(layout, hapi_filter=True)
    names = pipelines(layout)[1]
    more = set(names) - set(pipeline(ClusterSettings(**settings)))
    assert more == {"domain_remap", "etag-quoter", "ratelimit", "staticweb"}
    for left, right in (
        ("cache", "domain_remap"),
        ("domain_remap", "listing_formats"),
        ("cache", "etag-quoter"),
        ("ratelimit", "s3api"),
        ("s3api", "tempauth"),
        ("tempauth", "staticweb"),
    ):
        assert names.index(left) < names.index(right), (left, right)
    sections = settings["swift_options"]["proxy-server.conf"]
    for name in more:
        assert "use" in sections[f"filter:{name}"]


def test_options_of_the_filter_are_valid_and_not_the_defaults():
    config = FilterConfig.from_conf({}, FILTER_OPTIONS)
    changed = {
        name
        for name, value in vars(FilterConfig()).items()
        if getattr(config, name) != value
    }
    # The prefix of AUTH_test cannot be another one.
    assert changed == {*FILTER_OPTIONS} - {"reseller_prefix"}


def test_the_file_of_the_tests_leads_to_the_cluster():
    parser = configparser.ConfigParser()
    text = config_of_tests("plain", "http://127.0.0.1:81/auth/v1.0")
    parser.read_string(text)
    swift, s3 = parser["func_test"], parser["s3api_test"]
    assert swift["auth_uri"] == "http://127.0.0.1:81/auth/v1.0"
    assert swift["s3_storage_url"] == s3["endpoint"] == "http://127.0.0.1:81/"
    third = {name: swift[f"{name}3"] for name in ("username", "password")}
    assert third == {"username": "tester3", "password": "testing3"}
    assert (swift["s3_access_key"], s3["access_key1"]) == (
        *("test:tester", "test:tester"),
    )
    assert swift["s3_secret_key3"] == s3["secret_key3"] == "testing3"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tests_of_s3_acls_run_if_s3_acls_are_on(layout):
    parser = configparser.ConfigParser()
    parser.read_string(config_of_tests(layout, "http://127.0.0.1:81/a"))
    settings = cluster_settings(layout, hapi_filter=True)
    section = settings["swift_options"]["proxy-server.conf"]["filter:s3api"]
    expected = parser["s3api_test"]["s3_acl_tests_enabled"]
    assert section == {"s3_acl": expected, "check_bucket_owner": expected}


# -- the sdist --------------------------------------------------------------

FILES = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: swift\nVersion: 1.2.3\n\nx\n",
    "test/functional/__init__.py": "",
    "etc/proxy-server.conf-sample": "",
    "swift/__init__.py": "",
}


def write_archive(path, files=FILES):
    top = path.name.removesuffix(".tar.gz")
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """Sets the script that replaces ``python -m pip``."""

    def use(script):
        program = tmp_path / "python"
        program.write_text(f"#!{sys.executable}\nimport sys\n{script}")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    return use


def test_tests_are_unpacked_once_and_nothing_else(tmp_path, pip):
    write_archive(tmp_path / "swift-1.2.3.tar.gz")
    pip("sys.exit('it must not be asked')")
    folder = sdist.unpacked_sdist(tmp_path, "1.2.3")
    found = {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert found == set(FILES) - {"swift/__init__.py"}
    (tmp_path / "swift-1.2.3.tar.gz").unlink()
    assert sdist.unpacked_sdist(tmp_path, "1.2.3") == folder


def test_pip_fetches_the_installed_version(tmp_path, pip):
    archive = tmp_path / "elsewhere" / "swift-1.2.3.tar.gz"
    archive.parent.mkdir()
    write_archive(archive)
    pip(
        "import shutil\n"
        "assert sys.argv[1:4] == ['-m', 'pip', 'download']\n"
        "assert sys.argv[-1] == 'swift==1.2.3'\n"
        "dest = sys.argv[sys.argv.index('--dest') + 1]\n"
        f"shutil.copy({str(archive)!r}, dest)\n"
    )
    cache = tmp_path / "new" / "cache"
    assert sdist.unpacked_sdist(cache, "1.2.3") == cache / "swift-1.2.3"
    assert sorted(path.name for path in cache.iterdir()) == [
        *("swift-1.2.3", "swift-1.2.3.tar.gz")
    ]


def test_error_of_pip_is_reported_with_the_remedy(tmp_path, pip):
    pip("sys.exit('ERROR: No matching distribution found')")
    with pytest.raises(NotRunError) as caught:
        sdist.unpacked_sdist(tmp_path / "cache", "1.2.3")
    for said in (
        "swift-1.2.3.tar.gz",
        "No matching distribution",
        "PIP_INDEX_URL",
        str(tmp_path / "cache"),
    ):
        assert said in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({**FILES, "PKG-INFO": "Version: 1.2.4\n"}, "of swift 1.2.4"),
        ({"PKG-INFO": FILES["PKG-INFO"]}, "no tests of Swift"),
    ],
)
def test_other_archive_is_refused(tmp_path, files, said):
    write_archive(tmp_path / "swift-1.2.3.tar.gz", files)
    with pytest.raises(NotRunError, match=said):
        sdist.unpacked_sdist(tmp_path, "1.2.3")


def test_damaged_archive_leaves_no_files(tmp_path):
    archive = tmp_path / "swift-1.2.3.tar.gz"
    write_archive(archive)
    archive.write_bytes(archive.read_bytes()[:60])
    with pytest.raises(NotRunError, match="cannot be unpacked"):
        sdist.unpacked_sdist(tmp_path, "1.2.3")
    assert list(tmp_path.iterdir()) == [archive]


def test_cache_is_in_the_users_cache_folder(
    monkeypatch,
):
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert sdist.default_cache() == Path("/c/swift-hapi")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert sdist.default_cache() == Path("/h/.cache/swift-hapi")
