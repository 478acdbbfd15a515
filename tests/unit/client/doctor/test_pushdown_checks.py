"""Checks of ``hapi doctor`` against failing servers."""

import json
import socket
import threading
import time
from unittest.mock import Mock

import pytest

from hapi_client.doctor.check_runner import Check, Finding, run_checks
from hapi_client.doctor.pushdown_checks import findings
from hapi_client.swift.credentials import Credentials
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import DataIndex, IndexRow, ShardIndex
from hapi_protocol.errors import ClientError, RightsError
from scripted_swift import Answer

INFO = {
    "version": 1,
    "max_object_bytes": 100,
    "max_package_bytes": 100,
    "encodings": ["float32", "float32;lz4"],
    "cache": False,
}
NO_CONTENT = Answer(204)
BUSY = Answer(503, json.dumps({"code": "queue_full", "message": "f"}).encode())
INDEX = DataIndex((ShardIndex("a.tar", "e", (IndexRow(0, "k", 0, 9, 1),)),))


def info(**fields):
    facts = {"hapi": {**INFO, **fields}}
    return Answer(200, json.dumps(facts).encode())


def findings_of(swift, *answers, data=None, **environ):
    swift.script(*answers)
    variables = {"ST_AUTH": swift.auth_url, "ST_USER": "u", "ST_KEY": "k"}
    checked = findings(
        lambda: Credentials.from_environment({**variables, **environ}),
        data=data,
        seconds=5,
    )
    return {finding.check: finding for finding in checked}


def test_hanging_check_fails_and_the_next_one_runs():
    never = threading.Event()
    checks = [
        Check("a", lambda: str(never.wait(60)), remedies={"": "wait"}),
        Check("b", lambda: "fine"),
        Check("c", lambda: "not seen", needs=("b", "a")),
    ]
    started = time.monotonic()
    found = list(run_checks(checks, 0.2))
    never.set()
    assert time.monotonic() - started < 30
    states = {each.check: each.state for each in found}
    assert states == {"a": "failure", "b": "ok", "c": "skipped"}
    assert "did not end within 0.2 s" in found[0].found
    assert found[0].remedy == "wait"
    assert "needs a" in found[2].found


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (RightsError("forbidden", "no", object_name="c/o"), "by code"),
        (RightsError("not_found", "no", object_name="c/o"), "by status"),
        (ClientError("not_connected", "no", object_name="c/o"), "else"),
    ],
)
def test_remedy_is_selected_by_code_then_status(error, remedy):
    remedies = {"forbidden": "by code", 403: "", 404: "by status", "": "else"}
    [found] = run_checks(
        [Check("a", Mock(side_effect=error), (), remedies)], 5
    )
    assert found.remedy == remedy
    assert found.found == f"c/o: no (code {error.code})"


def test_bugs_are_not_reported_as_findings():
    check = Check("a", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        list(run_checks([check], 5))


def test_warning_does_not_skip_dependent_checks():
    warning = Check("a", lambda: Finding("warning", "hm"))
    dependent = Check("b", lambda: "fine", needs=("a",))
    found = run_checks([warning, dependent], 5)
    assert [each.state for each in found] == ["warning", "ok"]


def test_silent_auth_service_fails_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/auth/v1.0"
        credentials = Credentials.v1(url, "u", "k")
        credentials.make_plugin()  # its imports may take longer than a check
        started = time.monotonic()
        checked = findings(lambda: credentials, seconds=0.3)
        found = {finding.check: finding for finding in checked}
    assert time.monotonic() - started < 30
    assert found["auth"].state == "failure"
    assert url in found["auth"].found


@pytest.mark.parametrize(
    ("date", "state"),
    [
        ({"Date": "Mon, 01 Jan 2024 00:00:00 GMT"}, "warning"),
        ({"Date": "today"}, "ok"),
        ({}, "ok"),
    ],
)
def test_wrong_clock_is_a_warning(swift, date, state):
    headers = {"X-Account-Container-Count": "2", **date}
    found = findings_of(
        swift, Answer(204, headers=headers), info(), Answer(403)
    )
    assert found["account"].state == state
    assert ("clock is +" in found["account"].found) is (state == "warning")


def test_insecure_connection_is_a_warning(swift):
    found = findings_of(swift, Answer(204), OS_INSECURE="yes")
    assert found["credentials"].state == "warning"
    assert "OS_CACERT" in found["credentials"].remedy


def test_unsupported_version_of_the_filter_is_a_failure(swift):
    found = findings_of(swift, NO_CONTENT, info(version=2), Answer(403))
    assert found["versions"].state == "failure"
    assert "supports version 2 of the protocol" in found["versions"].found
    assert "one release" in found["versions"].remedy


def test_filter_without_limits_has_none(swift):
    bare = Answer(200, json.dumps({"hapi": {"version": 1}}).encode())
    found = findings_of(swift, NO_CONTENT, bare, Answer(403))
    assert found["limits"].state == found["versions"].state == "ok"
    assert "any size" in found["limits"].found


def test_busy_worker_is_a_warning(swift):
    created = [Answer(201), NO_CONTENT]
    found = findings_of(
        swift, NO_CONTENT, info(), *created, Answer(201), BUSY, NO_CONTENT
    )
    assert found["worker"].state == "warning"
    assert swift.requests[-1].method == "DELETE"


def test_container_of_packages_is_created(swift):
    answers = [Answer(404), Answer(201), Answer(201), NO_CONTENT]
    found = findings_of(swift, NO_CONTENT, info(), *answers, Answer(403))
    assert found["models"].state == "ok"
    probes = swift.requests[2:6]
    assert [each.method for each in probes] == ["PUT", "PUT", "PUT", "DELETE"]
    assert probes[1].path == "/v1/AUTH_test/hapi-models"
    assert probes[2].headers["X-Delete-After"] == "3600"
    assert probes[2].path == probes[3].path


def test_shards_over_the_limit_are_a_warning(swift):
    listing = [{"name": "a.tar", "hash": "e", "bytes": 101}]
    answers = (
        *(info(), Answer(403), NO_CONTENT, Answer(200, INDEX.to_bytes())),
        Answer(206, b"a"),
        Answer(200, json.dumps(listing).encode()),
    )
    found = findings_of(swift, NO_CONTENT, *answers, data=Location("c"))
    assert found["worker"].found.startswith("it responded")
    assert found["list"].state == "warning"
    assert "max_object_bytes, 100" in found["list"].found
    assert found["etags"].state == "ok"
