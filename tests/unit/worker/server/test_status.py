"""The worker's status, and the command that shows it."""

import json
import threading

import pytest
from typer.testing import CliRunner
from webob import Request

from hapi_client.cli import worker as command
from hapi_client.cli.main import app
from hapi_protocol.errors import UnavailableError
from hapi_worker.server.app import WorkerApp
from photos import shard
from waiting import until
from worker_under_test import in_two, job_for, running_worker

NUM_SAMPLES = 20


@pytest.fixture(scope="module")
def tar():
    return shard(NUM_SAMPLES, size=80)


@pytest.fixture
def worker(tmp_path):
    with running_worker(
        tmp_path,
        max_streams=2,
        queue_seconds=10,
        account_weights=(("AUTH_a", 3.0),),
    ) as worker:
        yield worker


def status_of(worker):
    answer = worker.request("GET", "/status", admin=True)
    assert answer.status == 200
    return answer.fields


def test_status_counts_work(worker, package, tar):
    worker.run(job_for(tar, package), package, tar)
    found = status_of(worker)
    assert found["status"] == "ok"
    assert found["totals"]["samples"] == NUM_SAMPLES
    assert found["totals"]["passes"] == 2
    assert found["totals"]["received_bytes"] == len(tar)
    [device] = found["devices"]
    assert device["name"] == "cpu"
    assert device["in_service"]
    [model] = device["models"]
    assert model["parameter_bytes"] == device["resident_bytes"] > 0
    assert found["accounts"] == []


def test_status_shows_streams_waiting_requests_and_weights(
    worker, package, tar
):
    worker.put(package)
    done = threading.Event()
    job = job_for(tar, package)
    other = job_for(tar, package, charged_account="AUTH_b")
    with (
        worker.streaming(job, None, in_two(tar, done)) as stream,
        worker.streaming(other, None, in_two(tar, done)),
    ):
        assert stream.answer().status == 200
        caller = threading.Thread(target=worker.ask, args=[other])
        caller.start()
        until(lambda: status_of(worker)["jobs_waiting"] == 1)
        found = status_of(worker)
        accounts = {each["account"]: each for each in found["accounts"]}
        assert accounts["AUTH_a"]["weight"] == 3
        assert accounts["AUTH_a"]["share"] == 0.75
        assert accounts["AUTH_b"]["streams"] == 1
        assert accounts["AUTH_b"]["waiting"] == 1
        assert accounts["AUTH_a"]["buffered_bytes"] > 0
        [model] = found["devices"][0]["models"]
        assert model["jobs"] == 2
        gauge = b"hapi_worker_buffered_bytes "
        metrics = worker.request("GET", "/metrics", admin=True).body
        [line] = [m for m in metrics.splitlines() if m.startswith(gauge)]
        assert float(line.removeprefix(gauge)) > 0
        done.set()
    caller.join(10)


@pytest.mark.parametrize(("uid", "shown"), [("0", True), ("12345", False)])
def test_names_of_accounts_are_for_root_and_the_worker(
    tmp_path, tar, uid, shown
):
    with running_worker(tmp_path, allowed_users=frozenset({12345})) as worker:
        worker.grant(job_for(tar))
        request = Request.blank("/status")
        request.environ["X_REMOTE_UID"] = uid
        found = request.get_response(WorkerApp(worker.worker)).json
    [account] = found["accounts"]
    assert account["account"] == ("AUTH_a" if shown else None)


def test_command_shows_tables_and_writes_json(worker, package, tar, tmp_path):
    worker.run(job_for(tar, package), package, tar)
    worker.grant(job_for(tar, package))
    path = tmp_path / "status.json"
    options = ["--socket", worker.config.socket + ".admin"]
    ran = CliRunner().invoke(
        app, ["worker", "status", *options, "--json", str(path)]
    )
    assert ran.exit_code == 0, ran.output
    for text in ("0 of 2 streams", "samples, 0 errors", "AUTH_a", "cpu"):
        assert text in ran.output
    found = json.loads(path.read_text())
    documented = " ".join((command.status.__doc__ or "").split())
    for key in (*found, *found["totals"], *found["devices"][0]):
        assert key in documented
    for key in found["accounts"][0]:
        assert key in documented


def test_rates_come_from_two_answers(worker):
    before = status_of(worker)
    after = json.loads(json.dumps(before))
    after["totals"]["samples"] += 50
    headline = command.tables(after, before, 2.0).renderables[0]
    assert "25.0 samples/s" in str(headline)


def test_missing_worker_is_reported_with_the_remedy(tmp_path):
    path = tmp_path / "no.sock"
    with pytest.raises(UnavailableError, match="hapi-worker"):
        command.request_status(path)
    ran = CliRunner().invoke(app, ["worker", "status", "--socket", str(path)])
    assert ran.exit_code != 0
