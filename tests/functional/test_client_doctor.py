"""``hapi doctor`` of a real Swift, well and ill."""

import json
import socket
import subprocess
import sys
import time

import pytest

from hapi_client.data.indexing import update_index
from hapi_client.doctor.pushdown_checks import findings
from hapi_client.swift.credentials import Credentials
from hapi_client.swift.swift_url import Location
from jobs import connected
from photos import shard
from second_swift import second_swift

DATA = Location("patients", "train")
READER = {"ST_USER": "test2:tester2", "ST_KEY": "testing2"}


@pytest.fixture(scope="module")
def data(connection, owner):
    owner.put("/AUTH_test/patients")
    for name in "ab":
        owner.put(f"/AUTH_test/patients/train/{name}.tar", shard(2))
    update_index(connection, DATA)


def look(cluster, data=None, *, seconds=300.0, **environ):
    """The findings by check."""
    variables = {**cluster.environment, **environ}
    checked = findings(
        lambda: Credentials.from_environment(variables),
        data=data,
        seconds=seconds,
    )
    return {finding.check: finding for finding in checked}


def states(found):
    """Checks that are not ok."""
    return {
        name: finding.state
        for name, finding in found.items()
        if finding.state != "ok"
    }


def test_all_is_well(cluster, data, connection):
    found = look(cluster, DATA)
    assert states(found) == {}
    assert list(found) == [
        *("credentials", "auth", "storage_url", "account", "filter"),
        *("versions", "limits", "cache", "places", "library", "models"),
        "worker",
        *("index", "read", "list", "etags"),
    ]
    assert found["storage_url"].found == connection.storage_url
    assert "a shard of 1 sample" in found["worker"].found
    assert "4 samples in 2 shards" in found["index"].found
    assert "on" in found["cache"].found
    left = [each.name for each in connection.list("hapi-models")]
    assert not [name for name in left if "doctor" in name]


def test_the_command_says_so_by_its_status(
    hapi, data, monkeypatch, capsys, tmp_path
):
    path = tmp_path / "doctor.json"
    assert hapi("doctor", DATA, "--json", path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 16 + 1
    assert lines[-1] == "16 ok, 0 warnings, 0 failures, 0 skipped"
    facts = json.loads(path.read_text())
    assert facts["ok"] is True
    assert set(facts["checks"][0]) == {
        *("check", "state", "found", "remedy", "trans_id")
    }
    monkeypatch.setenv("ST_KEY", "wrong")
    assert hapi("doctor", "--json", path) == 1
    assert "failure  auth " in capsys.readouterr().out
    assert json.loads(path.read_text())["ok"] is False


@pytest.mark.parametrize(
    ("environ", "check", "message", "remedy"),
    [
        ({"ST_KEY": "wrong"}, "auth", "refuses the cred", "check user, key"),
        (
            {"ST_AUTH": "http://127.0.0.1:9/auth/v1.0"},
            "auth",
            "127.0.0.1:9/auth/v1.0 does not answer",
            "check the auth URL, the network",
        ),
        ({"ST_USER": ""}, "credentials", "ST_USER is not set", "--help"),
        (
            {"OS_STORAGE_URL": "http://127.0.0.1:9/v1/AUTH_test"},
            "account",
            "account AUTH_test: ",
            "check the storage URL",
        ),
    ],
)
def test_what_all_else_needs_is_named_and_ends_the_look(
    cluster, environ, check, message, remedy
):
    found = look(cluster, DATA, **environ)
    names = list(found)
    after = names[names.index(check) + 1 :]
    expected = {check: "failure", **dict.fromkeys(after, "skipped")}
    assert states(found) == expected
    assert message in found[check].found
    assert remedy in found[check].remedy


def test_what_may_not_be_read_is_named(cluster, data):
    url = f"{cluster.proxy_url}/v1/AUTH_test"
    found = look(cluster, DATA, OS_STORAGE_URL=url, **READER)
    assert states(found) == {
        "account": "warning",
        "models": "failure",
        "worker": "skipped",
        "index": "failure",
        "read": "skipped",
        "list": "warning",
        "etags": "skipped",
    }
    assert "patients/train" in found["index"].found
    assert "X-Container-Read" in found["index"].remedy
    assert found["index"].trans_id is not None


def test_reader_of_shared_data_asks_the_worker_by_it(cluster, data, owner):
    where = "/AUTH_test/patients"
    owner.request("POST", where, {"X-Container-Read": "test2:tester2"})
    url = f"{cluster.proxy_url}/v1/AUTH_test"
    try:
        found = look(cluster, DATA, OS_STORAGE_URL=url, **READER)
    finally:
        owner.request("POST", where, {"X-Remove-Container-Read": "x"})
    assert states(found) == {"account": "warning", "models": "failure"}
    assert "hapi-models" in found["models"].remedy
    assert "it responded" in found["worker"].found


@pytest.mark.parametrize(
    ("place", "message", "remedy"),
    [
        ("nowhere", "no container 'nowhere'", "hapi ls"),
        ("stale", "has no index", "hapi index swift://st"),
        ("stale/no", "has no object", "or 'hapi upload' for new data"),
    ],
)
def test_a_missing_index_is_named(cluster, owner, place, message, remedy):
    owner.put("/AUTH_test/stale")
    owner.put("/AUTH_test/stale/a.tar", shard(1))
    found = look(cluster, Location(*place.split("/")))["index"]
    assert found.state == "failure"
    assert message in found.found
    assert remedy in found.remedy


def test_a_stale_index_is_named(cluster, connection, owner):
    owner.put("/AUTH_test/old")
    for name in "abc":
        owner.put(f"/AUTH_test/old/{name}.tar", shard(1))
    update_index(connection, Location("old"))
    owner.put("/AUTH_test/old/d.tar", shard(1))
    found = look(cluster, Location("old"))
    assert states(found) == {"etags": "warning"}

    owner.put("/AUTH_test/old/a.tar", shard(2))
    owner.request("DELETE", "/AUTH_test/old/b.tar")
    found = look(cluster, Location("old"))
    assert states(found) == {"read": "failure", "etags": "failure"}
    assert found["etags"].remedy == "hapi index swift://old"
    for part in ("written: a.tar", "missing: b.tar", "in it: d.tar"):
        assert part in found["etags"].found


def test_a_dead_and_a_hanging_worker_are_told_apart(cluster, tmp_path):
    path = tmp_path / "socket"
    options = {"worker_socket": str(path)}
    with (
        second_swift(cluster, filter_options=options) as swift,
        socket.socket(socket.AF_UNIX) as silent,
    ):
        dead = look(swift)
        silent.bind(str(path))
        silent.listen()
        started = time.monotonic()
        hanging = look(swift, seconds=1.0)
        assert time.monotonic() - started < 20
        with connected(swift) as connection:
            assert list(connection.list("hapi-models")) == []
    assert states(dead) == states(hanging) == {"worker": "failure"}
    assert "worker_unavailable" in dead["worker"].found
    assert "start hapi-worker" in dead["worker"].remedy
    assert "no response within 1 s" in hanging["worker"].found
    assert "hangs" in hanging["worker"].remedy


def test_a_proxy_without_the_filter_is_named(cluster):
    with second_swift(cluster, hapi_filter=False) as plain:
        found = look(plain)
    skipped = dict.fromkeys(
        ("versions", "limits", "cache", "places", "library", "worker"),
        "skipped",
    )
    assert states(found) == {"filter": "failure", **skipped}
    assert "pipeline" in found["filter"].remedy


def test_start_of_the_command_needs_no_torch():
    code = (
        "import sys; import hapi_client.cli.main; "
        "import hapi_client.doctor.pushdown_checks; "
        "import hapi_client.model.package_store; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
