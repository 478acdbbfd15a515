"""Accounting fields in the access log of a whole cluster."""

import pytest

from access_lines import used
from access_methods import s3_client, with_headers
from photos import shard, with_corrupt_member

ACCOUNT = "AUTH_test"
PLACE = f"/{ACCOUNT}/accounting"
NUM_SAMPLES = 12


@pytest.fixture(scope="module")
def sizes(owner):
    owner.put(PLACE)
    objects = {
        "good.tar": shard(NUM_SAMPLES),
        "one-bad.tar": with_corrupt_member(shard(NUM_SAMPLES), "s0-0002"),
    }
    for name, data in objects.items():
        owner.put(f"{PLACE}/{name}", data)
    return {name: len(data) for name, data in objects.items()}


@pytest.fixture
def headers(small_model):
    return {"X-Hapi-Model": small_model[0], "X-Hapi-Cut": "1"}


def entry_of(cluster, answer):
    return used(cluster, answer.headers["X-Trans-Id"])


def test_whole_stream_is_in_the_access_log(cluster, owner, sizes, headers):
    answer = owner.get(f"{PLACE}/one-bad.tar", headers)
    assert answer.status_code == 200
    found = entry_of(cluster, answer)

    assert found["model"].startswith(f"/{ACCOUNT}/models/")
    assert (found["cut"], found["account"]) == ("1", ACCOUNT)
    assert (found["samples"], found["errors"]) == (str(NUM_SAMPLES), "1")
    assert float(found["device_seconds"]) > 0
    assert float(found["decode_seconds"]) > 0
    assert found["source_bytes"] == str(sizes["one-bad.tar"])
    assert found["sent_bytes"] == str(len(answer.content))
    assert found["outcome"] == "done"


def test_requests_without_a_model_are_told_apart(cluster, owner, sizes):
    answer = owner.get(f"{PLACE}/good.tar", {"X-Hapi-Index": "true"})
    found = entry_of(cluster, answer)
    assert (found["model"], found["samples"]) == ("-", str(NUM_SAMPLES))
    assert found["sent_bytes"] == str(len(answer.content))
    assert found["device_seconds"] == "0.000"

    plain = owner.get(f"{PLACE}/good.tar")
    with pytest.raises(ValueError, match="not enough values"):
        entry_of(cluster, plain)


def test_s3_clients_stream_is_in_the_log_of_the_filter(
    cluster, sizes, headers
):
    pytest.importorskip("boto3", reason="S3 clients use boto3")
    client = s3_client(cluster, "test:tester")
    answer = with_headers(
        client,
        headers,
        lambda: client.get_object(Bucket="accounting", Key="good.tar"),
    )
    num_bytes = len(answer["Body"].read())
    trans_id = answer["ResponseMetadata"]["RequestId"]

    log = cluster.log("swift").read_text()
    [line] = [
        each
        for each in log.splitlines()
        if "hapi:model=" in each and trans_id in each
    ]
    assert f";samples={NUM_SAMPLES};errors=0;" in line
    assert f";account={ACCOUNT};" in line
    assert f";sent_bytes={num_bytes};outcome=done" in line
