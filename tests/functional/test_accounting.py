"""Accounting fields in the access log of a whole cluster."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

import pytest
import requests

from access_lines import used
from caller import Caller
from hapi_client import Connection, Credentials
from hapi_client.model.package_store import upload_package
from hapi_cluster import Cluster
from hapi_splitter.freezing.split_model import split
from hapi_splitter.package.writer import write_package
from networks import small_network, small_transform
from photos import shard, with_corrupt_member

ACCOUNT = "AUTH_test"
PLACE = f"/{ACCOUNT}/accounting"
NUM_SAMPLES = 12
SECONDS = 20.0
ENOUGH_BYTES = 20_000
"""First bytes of an answer, for a client that disconnects."""


@dataclass
class Billed:
    """A cluster, a caller with data on it, and its access log."""

    cluster: Cluster
    caller: Caller
    model: str
    sizes: dict[str, int]

    def headers(self, **changes):
        return {"X-Hapi-Model": self.model, "X-Hapi-Cut": "1", **changes}

    def used(self, trans_id):
        return used(self.cluster, trans_id)


@pytest.fixture(scope="module")
def billed(cluster, tmp_path_factory):
    parts = split(small_network(seed=3), "body", transform=small_transform())
    path = tmp_path_factory.mktemp("package") / "model.hapi"
    info = write_package(parts.frozen, path)
    credentials = Credentials.v1(cluster.auth_url, cluster.user, cluster.key)
    with Connection(credentials) as connection:
        model, _ = upload_package(connection, "models", path, info.digest)
    caller = Caller(cluster)
    caller.put(PLACE)
    objects = {
        "good.tar": shard(NUM_SAMPLES),
        "one-bad.tar": with_corrupt_member(shard(NUM_SAMPLES), "s0-0002"),
        "long.tar": shard(600, size=120),
        "no.tar": b"no tar " * 1000,
    }
    for name, data in objects.items():
        caller.put(f"{PLACE}/{name}", data)
    sizes = {name: len(data) for name, data in objects.items()}
    yield Billed(cluster, caller, model.quoted(), sizes)
    caller.close()


def test_whole_stream_is_in_the_access_log(billed):
    answer = billed.caller.get(f"{PLACE}/one-bad.tar", billed.headers())
    assert answer.status_code == 200
    used = billed.used(answer.headers["X-Trans-Id"])

    assert used["model"].startswith(f"/{ACCOUNT}/models/")
    assert (used["cut"], used["account"]) == ("1", ACCOUNT)
    assert (used["samples"], used["errors"]) == (str(NUM_SAMPLES), "1")
    assert float(used["device_seconds"]) > 0
    assert float(used["decode_seconds"]) > 0
    assert used["source_bytes"] == str(billed.sizes["one-bad.tar"])
    assert used["sent_bytes"] == str(len(answer.content))
    assert used["outcome"] == "done"


def test_index_is_in_the_access_log(billed):
    answer = billed.caller.get(f"{PLACE}/good.tar", {"X-Hapi-Index": "true"})
    used = billed.used(answer.headers["X-Trans-Id"])

    assert (used["model"], used["samples"]) == ("-", str(NUM_SAMPLES))
    assert used["sent_bytes"] == str(len(answer.content))
    assert used["device_seconds"] == "0.000"


def test_client_that_leaves_in_the_middle_is_in_the_access_log(
    billed,
):
    used = billed.used(leave_early(billed, f"{PLACE}/long.tar"))

    assert used["outcome"] == "gone"
    assert int(used["samples"]) < 600
    assert int(used["sent_bytes"]) > ENOUGH_BYTES // 2
    assert float(used["device_seconds"]) > 0
    assert float(used["decode_seconds"]) > 0
    assert 0 < int(used["source_bytes"]) <= billed.sizes["long.tar"]


def leave_early(billed, path):
    """Reads the head and a little of the body; the request's trans id."""
    proxy = urlsplit(billed.cluster.proxy_url)
    token = requests.get(
        billed.cluster.auth_url,
        headers={"X-Auth-User": "test:tester", "X-Auth-Key": "testing"},
        timeout=SECONDS,
    ).headers["X-Auth-Token"]
    lines = [f"GET /v1{quote(path)} HTTP/1.1", f"Host: {proxy.netloc}"]
    fields = billed.headers(**{"X-Auth-Token": token})
    lines += [f"{name}: {value}" for name, value in fields.items()]
    address = (str(proxy.hostname), proxy.port)
    with socket.create_connection(address, SECONDS) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode())
        data = b""
        while b"\r\n\r\n" not in data or len(data) < ENOUGH_BYTES:
            piece = client.recv(4096)
            assert piece, data[:500]
            data += piece
    head = data.partition(b"\r\n\r\n")[0]
    assert head.startswith(b"HTTP/1.1 200"), head
    [trans_id] = re.findall(rb"(?i)x-trans-id: (\S+)", head)
    return str(trans_id.decode())


def test_job_that_is_refused_is_in_the_access_log(billed):
    answer = billed.caller.get(f"{PLACE}/no.tar", billed.headers())
    assert answer.status_code == 422
    used = billed.used(answer.headers["X-Trans-Id"])

    assert (used["outcome"], used["samples"]) == ("failed", "0")
    assert used["reason"] == answer.json()["code"]


def test_s3_clients_stream_is_in_the_log_of_the_filter(
    billed,
):
    boto3 = pytest.importorskip("boto3", reason="S3 clients use boto3")
    from botocore.config import Config

    def annotate(request, **_):
        for name, value in billed.headers().items():
            request.headers[name] = value

    client = boto3.client(
        "s3",
        endpoint_url=billed.cluster.proxy_url,
        aws_access_key_id="test:tester",
        aws_secret_access_key="testing",
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}),
    )
    client.meta.events.register("before-sign.s3.GetObject", annotate)
    answer = client.get_object(Bucket="accounting", Key="good.tar")
    num_bytes = len(answer["Body"].read())
    trans_id = answer["ResponseMetadata"]["RequestId"]

    log = billed.cluster.log("swift").read_text()
    [line] = [each for each in log.splitlines() if "hapi:model=" in each]
    assert f";samples={NUM_SAMPLES};errors=0;" in line
    assert f";sent_bytes={num_bytes};outcome=done" in line
    assert trans_id in line


def test_plain_get_has_no_entry(billed):
    answer = billed.caller.get(f"{PLACE}/good.tar")
    with pytest.raises(ValueError, match="not enough values"):
        billed.used(answer.headers["X-Trans-Id"])
