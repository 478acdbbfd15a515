"""Features computed on object servers, next to the disks.

Three object servers have the devices of replicated and erasure-coded
policies; the first two have the filter and a worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import io
import itertools
import json
import os
import resource
import signal
import tarfile
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, unquote

import pytest
import requests
import torch

from access_lines import used
from caller import Caller
from hapi_client.data.indexing import update_index
from hapi_client.doctor.check_runner import FAILURE, OK, WARNING
from hapi_client.doctor.node_checks import node_findings
from hapi_client.swift.swift_url import Location
from hapi_cluster import Cluster
from hapi_middleware.places.node_table import TOLD_SECONDS
from hapi_middleware.requests.package import KNOWN_SECONDS
from hapi_protocol.backend import (
    BACKEND_VERSION,
    HEADER_ADDRESS,
    HEADER_MESSAGE_BYTES,
    HEADER_NONCE,
    HEADER_SIGNATURE,
    HEADER_STEP,
    HEADER_VERSION,
    METHOD,
    STEP_JOB,
    STEP_MODEL,
    JobOrder,
    ModelOrder,
)
from hapi_protocol.errors import ConflictError
from hapi_protocol.feature_reader import read_features
from hapi_protocol.frames import FrameReader, Kind, read_error
from hapi_protocol.job_messages import JobRequest, ModelIdentity
from hapi_protocol.profiles import ModelProfile
from hapi_protocol.shards import iter_samples
from hapi_protocol.signatures import SignedRequest, read_keys
from hapi_splitter.package.writer import digest_of, package_bytes
from jobs import connected, small_job, upload_shards
from local_rows import local_rows, received_rows
from networks import small_parts
from objects_of_kinds import KINDS, make_containers, store
from own_servers import OwnServers, own_servers
from photos import jpegs, shard
from replicas import replicas
from second_proxy import counted_links, second_proxy
from slow_link import slow_link
from waiting import SECONDS, until
from worker_under_test import Exchange

SETTINGS = {
    "layout": "mixed",
    "object_servers": 3,
    "object_workers": 2,
    "worker_options": {"device": "cpu"},
    "filter_options": {"cache": "true", "object_suppress_seconds": "2"},
    "object_options": {"worker_timeout": "10"},
    "swift_options": {
        "proxy-server.conf": {
            "app:proxy-server": {
                "conn_timeout": "0.5",
                "node_timeout": "3",
                "recoverable_node_timeout": "3",
                "error_suppression_interval": "2",
            }
        }
    },
}
SERVERS = ("object", "object-2", "object-3")
PLACE = "/AUTH_test/near"
EC_PLACE = "/AUTH_test/near-ec"
MODEL = f"{PLACE}/net.hapi"
ASKED = {"X-Hapi-Model": MODEL, "X-Hapi-Cut": "1"}
NUM_ROWS = 6
CONTENT = shard(NUM_ROWS, seed=5)


@dataclass
class Near:
    """The cluster, its owner, and a proxy that computes by itself."""

    cluster: Cluster
    servers: OwnServers
    owner: Caller
    by_proxy: Caller
    frozen: object

    def get(self, path, headers=ASKED):
        return self.owner.get(path, headers)

    def put(self, name, content=CONTENT):
        self.owner.put(f"{PLACE}/{name}", content)
        return f"{PLACE}/{name}"

    def pid(self, name):
        return self.servers.processes[name].pid

    def log(self, name):
        return self.cluster.log(name).read_text()


@pytest.fixture(scope="module")
def near(tmp_path_factory):
    pytest.importorskip("swift", reason="needs swift-hapi[cluster]")
    with own_servers(**SETTINGS) as (cluster, servers):
        options = {"places": "proxy"}
        folder = tmp_path_factory.mktemp("proxy")
        with second_proxy(cluster, folder, options) as url:
            owner = Caller(cluster)
            by_proxy = Caller(cluster, proxy_url=url)
            for container, policy in (
                (PLACE, "replicated"),
                (EC_PLACE, "ec42"),
            ):
                owner.put(container, headers={"X-Storage-Policy": policy})
            frozen = small_parts().frozen
            owner.put(MODEL, package_bytes(frozen))
            yield Near(cluster, servers, owner, by_proxy, frozen)
            owner.close()
            by_proxy.close()


def told(answer):
    """The content of an answer, but for what no two answers share."""
    headers = {
        name: value
        for name, value in answer.headers.items()
        if name.lower() not in HOP_HEADERS
    }
    body = answer.content
    if answer.status_code == 200 and body:
        # But for batches, and the times in its summary.
        body = []
        for batch in read_features(io.BytesIO(answer.content)):
            features = [] if batch.features is None else batch.features
            good = iter(features.tolist() if len(features) else ())
            body += [
                (row, None if row.error else next(good, None))
                for row in batch.rows
            ]
    if answer.status_code >= 400:
        fields = answer.json()
        fields.pop("trans_id", None)
        body = fields
    return answer.status_code, headers, body


HOP_HEADERS = {
    "date",
    "x-trans-id",
    "x-openstack-request-id",
    "transfer-encoding",
    "connection",
    "x-hapi-worker",
}


def computed_on(near, answer):
    """Names of the object servers that logged a request's job."""
    trans_id = answer.headers["X-Trans-Id"]
    return [
        name
        for name in SERVERS
        if any(
            "hapi_object:" in line and trans_id in line
            for line in near.log(name).splitlines()
        )
    ]


def assert_rows(near, answer):
    """Asserts the rows of CONTENT."""
    assert answer.status_code == 200, answer.text[:500]
    rows = received_rows(answer.content)
    rows.assert_equal(local_rows(near.frozen, 1, CONTENT, "any"))


def assert_near(near, answer):
    """Asserts good rows, computed on an object server."""
    assert_rows(near, answer)
    until(lambda: computed_on(near, answer), 5, lambda: near.log("object"))


INDEX = {"X-Hapi-Index": "true", "X-Hapi-Model": None, "X-Hapi-Cut": None}
REQUESTS = {
    "whole": {},
    "samples": {"X-Hapi-Samples": "1-3"},
    "encoding": {"X-Hapi-Encoding": "float16"},
    "cache": {"X-Hapi-Cache": "readwrite"},
    "no such cut": {"X-Hapi-Cut": "99"},
    "no such samples": {"X-Hapi-Samples": "90-91"},
    "no such model": {"X-Hapi-Model": f"{PLACE}/none.hapi"},
    "no model": {"X-Hapi-Model": f"{PLACE}/equal.tar"},
    "no match": {"If-None-Match": "*"},
    "other version": {"X-Hapi-If-Source-Etag": "0" * 32},
    "torn": {},
    "index": INDEX,
    "torn index": INDEX,
}


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_equal_those_of_the_proxys_worker(near, name):
    content = CONTENT[:3000] if name.startswith("torn") else CONTENT
    path = near.put("equal.tar", content)
    headers = {**ASKED, **REQUESTS[name]}
    for method in ("GET", "HEAD"):
        near_disk = near.owner.request(method, path, headers)
        by_proxy = near.by_proxy.request(method, path, headers)
        if method == "HEAD" and near_disk.status_code >= 400:
            assert near_disk.status_code == by_proxy.status_code
        else:
            assert told(near_disk) == told(by_proxy)
    if name == "whole":
        etag = near_disk.headers["ETag"]
        for caller in (near.owner, near.by_proxy):
            again = caller.get(path, {**headers, "If-None-Match": etag})
            assert again.status_code == 304
            assert again.headers["ETag"] == etag


def test_whole_objects_and_ranges_are_computed_near_the_disk(near):
    path = near.put("near.tar")
    answer = near.get(path)
    assert_near(near, answer)
    entry = used(near.cluster, answer.headers["X-Trans-Id"])
    assert entry["outcome"] == "done"
    assert int(entry["samples"]) == NUM_ROWS
    assert int(entry["source_bytes"]) == len(CONTENT)


@pytest.fixture(scope="module")
def crossed(near, tmp_path_factory):
    """Sends a request: the bytes that leave object servers, and the answer."""
    folder = tmp_path_factory.mktemp("counted")
    with counted_links(near.cluster, near.servers) as links:
        ports = {port: link.port for port, link in links.items()}
        with second_proxy(near.cluster, folder, {}, links=ports) as url:
            caller = Caller(near.cluster, proxy_url=url)

            def ask(path, headers, body=None):
                before = sum(each.answer_bytes for each in links.values())
                method = "GET" if body is None else "POST"
                answer = caller.request(method, path, headers, body)
                assert answer.status_code == 200, answer.text[:500]
                after = sum(each.answer_bytes for each in links.values())
                return after - before, answer

            yield ask
            caller.close()


def test_image_bytes_stay_on_their_host(near, crossed):
    path = near.put("stays.tar")
    crossed(path, ASKED)  # brings the package
    plain, answer = crossed(path, {})
    assert plain >= len(answer.content) == len(CONTENT)
    sent, answer = crossed(path, ASKED)
    heads = 2 * 2000
    assert sent <= 1.01 * len(answer.content) + heads


@pytest.fixture(scope="module")
def kinds(near):
    """One content as each kind of object, in a replicated policy."""
    for name in ("near-kinds", "near-kinds-parts", "near-kinds-old"):
        policy = {"X-Storage-Policy": "replicated"}
        near.owner.put(f"/AUTH_test/{name}", headers=policy)
    make_containers(near.owner, "near-kinds", "")
    targets = store(near.owner, "near-kinds", "tar", CONTENT, b"later")
    near.owner.put(f"{EC_PLACE}/ec.tar", CONTENT)
    return {
        **{
            kind: (target.path, target.version)
            for kind, target in targets.items()
        },
        "ec": (f"{EC_PLACE}/ec.tar", None),
    }


@pytest.mark.parametrize("kind", [*KINDS, "ec"])
def test_each_kind_of_object_gives_the_right_features(
    near, kinds, kind, without_worker
):
    path, version = kinds[kind]
    query = f"?version-id={version}" if version else ""
    assert_near(near, without_worker.get(f"{path}{query}", ASKED))
    # What the proxy reads anyway goes to its own worker, if it has one.
    answer = near.get(f"{path}{query}")
    if kind in ("plain", "symlink"):
        assert_near(near, answer)
    else:
        assert_rows(near, answer)
        assert not computed_on(near, answer)
    if kind != "plain":
        etag = near.owner.request("HEAD", f"{path}{query}").headers["ETag"]
        for replica in replicas(near.cluster, unquote(path)):
            status, _ = ask(near, replica, unquote(path), etag.strip('"'))
            assert status in (404, 405, 412, 422), (kind, status)


def test_encrypted_objects_are_sent_to_an_object_server(near, tmp_path):
    """The object servers have ciphertext, of objects and of the package."""
    options = {"places": "object"}
    with second_proxy(near.cluster, tmp_path, options, encrypts=True) as url:
        caller = Caller(near.cluster, proxy_url=url)
        path, model = f"{PLACE}/secret.tar", f"{PLACE}/secret.hapi"
        caller.put(path, CONTENT)
        caller.put(model, package_bytes(near.frozen))
        asked = {**ASKED, "X-Hapi-Model": model}
        assert_near(near, caller.get(path, asked))
        assert caller.get(path, {}).content == CONTENT
        etag = caller.request("HEAD", path).headers["ETag"]
        names = ["secret-a.jpg", "secret-b.jpg"]
        for name, (data, _) in zip(names, jpegs(2, seed=4), strict=True):
            caller.put(f"{PLACE}/{name}", data)
        body = "\n".join(names).encode()
        many = caller.request("POST", MANY, asked, body)
        assert [row.error for row, _ in told(many)[2]] == [None, None]
        caller.close()
    for replica in replicas(near.cluster, path):
        assert CONTENT[:500] not in replica.path.read_bytes()
        assert ask(near, replica, path, etag)[0] in (405, 412, 422)


def span_of(first, last):
    """Headers that ask for samples by their bytes, without the ETag."""
    samples = list(iter_samples(io.BytesIO(CONTENT), name="content"))
    end = samples[last].offset + samples[last].length - 1
    return {
        "X-Hapi-Samples": f"{first}-{last}",
        "X-Hapi-Range": f"bytes={samples[first].offset}-{end}",
    }


@pytest.mark.parametrize("kind", ["slo", "symlink"])
def test_spans_of_segments_and_links_stay_on_their_host(
    near, kinds, crossed, kind
):
    """Each half of the large object is a segment; spans within one stay."""
    path, _ = kinds[kind]
    etag = near.owner.request("HEAD", path).headers["ETag"].strip('"')
    last = NUM_ROWS - 1
    for first, end, stays in (
        (0, 1, True),
        (last - 1, last, True),
        (0, last, kind == "symlink"),
    ):
        asked = {**ASKED, **span_of(first, end), "X-Hapi-If-Source-Etag": etag}
        crossed(path, asked)  # brings the package
        sent, answer = crossed(path, asked)
        assert told(answer) == told(near.by_proxy.get(path, asked))
        length = int(asked["X-Hapi-Range"].rpartition("-")[2]) + 1
        length -= int(asked["X-Hapi-Range"].split("=")[1].split("-")[0])
        features = len(answer.content)
        # What does not stay crosses once, to the proxy's own worker.
        heads = 8000
        assert sent < (features if stays else length) + heads
        assert bool(computed_on(near, answer)) == stays


def order_for(name, etag, length, package):
    """The order of a job that reads a whole object."""
    return JobOrder(
        JobRequest(
            kind="features",
            charged_account="AUTH_test",
            model=package,
            cut=1,
            encoding="float32",
            transform="eval",
            numerics="exact",
            samples=None,
            ranged=False,
            source_name=name,
            source_etag=etag,
            source_length_bytes=length,
            trans_id="tx-direct",
        ),
        etag,
    )


def index_job(name, etag, length):
    job = order_for(name, etag, length, None).job
    return replace(job, kind="index", cut=0)


def package_of(near):
    head = near.owner.request("HEAD", MODEL)
    return ModelIdentity(
        *MODEL[1:].split("/"),
        etag=head.headers["ETag"],
        length_bytes=int(head.headers["Content-Length"]),
    )


def ask(
    near,
    replica,
    name,
    etag,
    *,
    step=STEP_JOB,
    message=None,
    key=None,
    sign=lambda signed: signed,
    headers=None,
    length=None,
    after=b"",
):
    """Asks an object server directly; returns status and frames or body."""
    if message is None:
        size = len(CONTENT) if length is None else length
        order = order_for(name, etag, size, package_of(near))
        message = order.to_body()
    [own] = read_keys(near.cluster.directory / "etc" / "hapi-backend.key")
    path = f"/{replica.device}/{replica.partition}{name}"
    signed = SignedRequest(
        address=f"127.0.0.1:{replica.port}",
        path=path,
        step=step,
        version=str(BACKEND_VERSION),
        policy_index=str(replica.policy_index),
        timestamp=f"{time.time():.5f}",
        nonce=uuid.uuid4().hex,
        message=message,
    )
    sent = {
        "X-Trans-Id": "tx-direct",
        **signed.headers(key or own),
        HEADER_SIGNATURE: sign(signed).signature(key or own),
        **(headers or {}),
    }
    connection = http.client.HTTPConnection(
        "127.0.0.1", replica.port, timeout=SECONDS
    )
    connection.request(METHOD, quote(path), message + after, sent)
    answer = connection.getresponse()
    try:
        if answer.status != 200:
            return answer.status, answer.read()
        frames = FrameReader(answer.read)
        received = [frames.next()]
        while received[-1][0] not in (Kind.END, Kind.ERROR):
            received.append(frames.next())
        return 200, [frame for frame in received if frame[0] is not Kind.BEAT]
    finally:
        connection.close()


@pytest.fixture
def direct(near):
    """An object, and its replica on a server that has the filter."""
    path = near.put("direct.tar")
    etag = near.owner.request("HEAD", path).headers["ETag"]
    near.get(path)  # brings the package to one of them
    first = next(
        replica
        for replica in replicas(near.cluster, path)
        if replica.server in SERVERS[:2]
    )
    return path, etag, first


def test_signed_job_is_computed(near, direct):
    path, etag, replica = direct
    near.owner.request("GET", path, ASKED)
    status, frames = ask(near, replica, path, etag)
    assert status == 200
    kinds = [kind for kind, _ in frames]
    if kinds == [Kind.ERROR]:  # the package is at the other server
        assert read_error(frames[0][1]).code == "model_needed"
        return
    assert kinds[:2] == [Kind.READY, Kind.ANSWER]
    assert kinds[-2:] == [Kind.USAGE, Kind.END]
    data = b"".join(data for kind, data in frames if kind is Kind.DATA)
    received_rows(data).assert_equal(
        local_rows(near.frozen, 1, CONTENT, "any")
    )


FORGED = {
    "no signature": {"headers": {HEADER_SIGNATURE: ""}},
    "another key": {"key": b"x" * 40},
    "a short key": {"key": b"x"},
    "old": {
        "sign": lambda signed: replace(
            signed, timestamp=str(float(signed.timestamp) - 120)
        ),
        "headers": {"X-Timestamp": f"{time.time() - 120:.5f}"},
    },
    "another server": {
        "sign": lambda signed: replace(signed, address="127.0.0.1:1"),
        "headers": {HEADER_ADDRESS: "127.0.0.1:1"},
    },
    "another object": {
        "sign": lambda signed: replace(signed, path=f"{signed.path}2")
    },
    "another policy": {
        "sign": lambda signed: replace(signed, policy_index="0")
    },
    "another step": {"sign": lambda signed: replace(signed, step=STEP_MODEL)},
    "another message": {"sign": lambda signed: replace(signed, message=b"{}")},
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_requests_open_nothing(near, direct, name):
    path, etag, replica = direct
    before = near.log(f"{replica.server}-worker")
    status, body = ask(near, replica, path, etag, **FORGED[name])
    assert status == 403, body
    assert near.log(f"{replica.server}-worker") == before
    log = near.log(replica.server)
    assert "refused a request of 127.0.0.1" in log


def test_repeated_request_is_refused(near, direct):
    path, etag, replica = direct
    fixed = SignedRequest(
        f"127.0.0.1:{replica.port}",
        f"/{replica.device}/{replica.partition}{path}",
        STEP_JOB,
        str(BACKEND_VERSION),
        str(replica.policy_index),
        f"{time.time():.5f}",
        uuid.uuid4().hex,
        order_for(path, etag, len(CONTENT), package_of(near)).to_body(),
    )
    again = {
        "sign": lambda _: fixed,
        "message": fixed.message,
        "headers": {
            "X-Timestamp": fixed.timestamp,
            HEADER_NONCE: fixed.nonce,
        },
    }
    assert ask(near, replica, path, etag, **again)[0] == 200
    status, body = ask(near, replica, path, etag, **again)
    assert (status, body) == (403, b"it is repeated")


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"headers": {HEADER_VERSION: "1"}}, 400),
        ({"headers": {HEADER_VERSION: "3"}}, 400),
        ({"headers": {HEADER_MESSAGE_BYTES: "99999999"}}, 400),
        ({"headers": {HEADER_MESSAGE_BYTES: "x"}}, 400),
        ({"step": "other"}, 400),
        ({"message": b"[]"}, 400),
        ({"message": b"{}"}, 400),
    ],
)
def test_malformed_requests_are_refused(near, direct, options, status):
    path, etag, replica = direct
    assert ask(near, replica, path, etag, **options)[0] == status


def test_other_version_of_an_object_is_not_computed(near, direct):
    path, etag, replica = direct
    assert ask(near, replica, path, "0" * 32)[0] == 412
    assert ask(near, replica, path, etag, length=77)[0] == 412
    gone = f"{PLACE}/gone.tar"
    assert ask(near, replica, gone, etag)[0] == 404


def test_clients_cannot_reach_the_filter_of_object_servers(near, direct):
    path, _etag, _replica = direct
    answer = near.owner.request(METHOD, path)
    assert answer.status_code == 405
    plain = near.owner.get(path, {HEADER_STEP: STEP_JOB})
    assert plain.content == CONTENT


def test_object_server_without_the_filter_stays_untouched(near):
    alone = []
    while not alone:
        path = near.put(f"untouched-{uuid.uuid4().hex}.tar")
        alone = [
            replica
            for replica in replicas(near.cluster, path)
            if replica.server == SERVERS[2]
        ]
    near.owner.request(
        "POST", path, {"X-Object-Meta-Colour": "red"}
    ).raise_for_status()
    etag = near.owner.request("HEAD", path).headers["ETag"]
    before = {replica: replica.path.stat() for replica in alone}
    for replica in alone:
        assert ask(near, replica, path, etag)[0] == 405
    for replica, stat in before.items():
        assert replica.path.stat() == stat
        assert list(replica.path.parent.iterdir())
    head = near.owner.request("HEAD", path)
    assert head.headers["X-Object-Meta-Colour"] == "red"
    assert_near(near, near.get(path))


def send_package(near, direct, identity, content=b""):
    """The last frame of an object server's answer to a package."""
    path, etag, replica = direct
    status, frames = ask(
        near,
        replica,
        path,
        etag,
        step=STEP_MODEL,
        message=ModelOrder(identity).to_body(),
        after=content,
    )
    assert status == 200
    return frames[-1]


def test_model_of_other_bytes_is_never_used_under_its_name(near, direct):
    """The worker maps an identity to bytes that it has hashed itself."""
    claimed = replace(package_of(near), etag="f" * 32, length_bytes=5)
    kind, payload = send_package(near, direct, claimed)
    assert kind is Kind.ERROR
    assert "5 bytes are missing" in read_error(payload).message


def test_other_bytes_with_a_captured_order_are_not_used(near, direct):
    """And the owner's package is taken afterwards."""
    good = package_bytes(small_parts(seed=81).frozen)
    bad = package_bytes(small_parts(seed=82).frozen)
    assert len(good) == len(bad)
    model = f"{PLACE}/signed.hapi"
    near.owner.put(model, good)
    identity = ModelIdentity(
        *model[1:].split("/"),
        etag=hashlib.md5(good).hexdigest(),
        length_bytes=len(good),
    )
    for content, kind in ((bad, Kind.ERROR), (good, Kind.END)):
        assert send_package(near, direct, identity, content)[0] is kind
    *_, replica = direct
    log = near.log(f"{replica.server}-worker")
    assert digest_of(small_parts(seed=81).frozen)[:12] in log
    assert digest_of(small_parts(seed=82).frozen)[:12] not in log


def test_package_is_looked_at_once_a_second_and_rights_each_time(near):
    """At 1,000 nodes its three hosts had thousands of HEADs a second."""
    path = near.put("popular.tar")
    model = f"{PLACE}/popular.hapi"
    near.owner.put(model, package_bytes(near.frozen))
    asked = {**ASKED, "X-Hapi-Model": model}

    def heads():
        return sum(near.log(name).count(f'{model}" 200') for name in SERVERS)

    until(lambda: near.get(path, asked).ok)
    before, started = heads(), time.monotonic()
    for _ in range(20):
        assert near.get(path, asked).status_code == 200
    seconds = time.monotonic() - started
    assert heads() - before <= 2 + seconds / KNOWN_SECONDS
    stranger = Caller(near.cluster, "test2:tester2")
    try:
        container = f"/AUTH_test2/own-{uuid.uuid4().hex}"
        stranger.put(container)
        stranger.put(f"{container}/own.tar", CONTENT)
        near.get(path, asked)
        refused = stranger.get(f"{container}/own.tar", asked)
    finally:
        stranger.close()
    assert refused.status_code == 403, refused.text
    assert "your own GET" in refused.json()["message"]
    assert model in refused.json()["message"]


# -- faults ------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos(near):
    """A data set of several shards in the replicated policy."""
    with connected(near.cluster) as connection:
        near.owner.put(
            "/AUTH_test/near-photos",
            headers={"X-Storage-Policy": "replicated"},
        )
        place = Location("near-photos", "train")
        shards = {f"{n:02d}.tar": shard(16, seed=n) for n in range(12)}
        upload_shards(connection, place, shards)
        # Stores the package; with two of six fragments lost, Swift cannot.
        small_job(place, connection=connection, cut="freeze").close()
        yield place, 12 * 16


def epoch(near, photos, meanwhile=lambda: None, **login):
    """An epoch by push-down; each sample exactly once."""
    place, num_samples = photos
    with (
        connected(near.cluster, **login) as connection,
        small_job(
            place, connection=connection, cut="freeze", batch_size=8
        ) as job,
    ):
        loader = job.pipeline.loader(0)
        count = 0
        for step, (features, _) in enumerate(loader):
            if step == 2:
                meanwhile()
            assert torch.isfinite(features).all()
            count += len(features)
        assert count == num_samples


@pytest.fixture
def expected(near, photos):
    place, _ = photos
    with (
        connected(near.cluster) as connection,
        small_job(place, connection=connection, cut="stream") as job,
    ):
        return torch.cat([features for features, _ in job.pipeline.loader()])


def test_an_epoch_is_computed_on_both_servers(near, photos, expected):
    before = {name: near.log(name).count("hapi_object: /") for name in SERVERS}
    place, _num_samples = photos
    with (
        connected(near.cluster) as connection,
        small_job(place, connection=connection, cut="freeze") as job,
    ):
        features = torch.cat(
            [features for features, _ in job.pipeline.loader()]
        )
        assert job.stats.fallbacks == 0
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    done = {
        name: near.log(name).count("hapi_object: /") - before[name]
        for name in SERVERS
    }
    assert done["object"]
    assert done["object-2"]
    assert not done["object-3"]


@pytest.mark.parametrize(
    ("victim", "signum"),
    [
        ("object", signal.SIGKILL),
        ("object-2", signal.SIGSTOP),
        ("object-worker", signal.SIGKILL),
        ("object-2-worker", signal.SIGSTOP),
    ],
)
@pytest.mark.parametrize("when", ["before", "during"])
def test_an_epoch_survives_a_server_that_dies_or_hangs(
    near, photos, victim, signum, when
):
    pid = near.pid(victim)

    def hurt():
        os.kill(pid, signum)

    try:
        if when == "before":
            hurt()
        epoch(near, photos, hurt if when == "during" else lambda: None)
    finally:
        if signum == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        else:
            near.servers.restart(victim)
    compute_again(near)


def test_hung_worker_is_named_and_left_for_another_replica(near):
    """Its object server answers, and sends no beats for it."""
    compute_again(near)
    pid = near.pid("object-2-worker")
    port = near.cluster.status()["ports"]["object-2"]
    os.kill(pid, signal.SIGSTOP)
    try:
        silence = f":{port} has no worker that answers"
        for number in range(40):  # some are first asked of this one
            if number > 5 and silence in near.log("swift"):
                break
            path = near.put(f"hung-{number}.tar")
            answer = near.get(path)
            assert_rows(near, answer)
            assert computed_on(near, answer) != ["object-2"]
        assert "has not answered for 2 s: it is stopped" in near.log(
            "object-2"
        )
        assert silence in near.log("swift")
        conf = near.cluster.directory / "etc" / "proxy-server.conf"
        [failed] = [e for e in node_findings(conf) if e.state == FAILURE]
        assert failed.check.endswith(f":{port}")
        assert "has not answered for 2 s" in failed.found
    finally:
        os.kill(pid, signal.SIGCONT)
    compute_again(near)


@pytest.mark.parametrize("when", ["before", "during"])
def test_an_epoch_survives_a_disk_that_is_not_mounted(near, photos, when):
    device = near.cluster.directory / "srv" / "d1"
    away = device.with_name("d1-away")

    def unmount():
        device.rename(away)

    try:
        if when == "before":
            unmount()
        epoch(near, photos, unmount if when == "during" else lambda: None)
    finally:
        away.rename(device)
    compute_again(near)


@contextmanager
def limited_files(pid, num_bytes):
    """Limits the size of a process's files."""
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def test_worker_with_a_full_disk_is_not_needed(near):
    """It cannot store a new model, with which another place computes."""
    frozen = small_parts(seed=78).frozen
    model = f"{PLACE}/full.hapi"
    near.owner.put(model, package_bytes(frozen))
    expected = local_rows(frozen, 1, CONTENT, "any")
    before = uploads(near, "o1.sock")
    with limited_files(near.pid("object-worker"), 1000):
        refusal = f"does not take the model {model}"
        for number in range(40):  # some are first asked of this one
            if number > 5 and refusal in near.log("swift"):
                break
            path = near.put(f"full-{number}.tar")
            answer = near.get(path, {**ASKED, "X-Hapi-Model": model})
            assert answer.status_code == 200, answer.text[:500]
            received_rows(answer.content).assert_equal(expected)
            assert "object" not in computed_on(near, answer)
        # It is sent the package again after two seconds, then after four.
        assert uploads(near, "o1.sock") - before <= 3
        assert refusal in near.log("swift")
    compute_again(near)


def exchange(near, socket):
    return Exchange(str(near.cluster.directory / "run" / socket))


def uploads(near, socket):
    """Packages that a worker has been sent."""
    answer = exchange(near, socket).request("GET", "/metrics", admin=True)
    return sum(
        float(line.split()[-1])
        for line in answer.body.decode().splitlines()
        if line.startswith("hapi_worker_uploads_total")
    )


def test_worker_that_cannot_validate_is_degraded_and_sent_nothing(near):
    """Its host refuses what the validation of any package needs."""
    compute_again(near)
    port = near.cluster.status()["ports"]["object"]
    conf = near.cluster.directory / "etc" / "proxy-server.conf"
    with limited_files(near.pid("object-worker"), 10):
        [failed] = [e for e in node_findings(conf) if e.state == FAILURE]
        assert failed.check.endswith(f":{port}")
        assert "degraded" in failed.found
        assert "free space in TMPDIR" in failed.found
        before = uploads(near, "o1.sock")
        for seed in range(90, 96):
            model = f"{PLACE}/degraded-{seed}.hapi"
            near.owner.put(model, package_bytes(small_parts(seed=seed).frozen))
            answer = near.get(
                near.put(f"degraded-{seed}.tar"),
                {**ASKED, "X-Hapi-Model": model},
            )
            assert answer.status_code == 200, answer.text[:500]
            assert "object" not in computed_on(near, answer)
        assert uploads(near, "o1.sock") == before
        # Models that it has are computed.
        compute_again(near)
        log = near.log("object")
        assert log.count(f"the worker of 127.0.0.1:{port} is degraded") == 1
    states = [finding.state for finding in node_findings(conf)]
    assert sorted(states) == sorted([OK, OK, WARNING])


def change_queue(near, seconds):
    """Sets how long requests wait for a place at the workers."""
    for name in ("object-worker", "object-2-worker"):
        path = near.cluster.directory / "etc" / f"hapi-{name}.conf"
        lines = [
            line
            for line in path.read_text().splitlines()
            if not line.startswith("queue_seconds")
        ]
        path.write_text("\n".join([*lines, f"queue_seconds = {seconds}", ""]))
        before = near.log(name).count("reloaded")
        os.kill(near.pid(name), signal.SIGHUP)
        until(lambda n=name, b=before: near.log(n).count("reloaded") > b)


def take_all_places(near):
    """Takes the account's places at both workers, for some seconds."""
    job = index_job("/AUTH_test/c/held", "0" * 32, 1)
    for socket in SOCKETS.values():
        status = 201
        while status == 201:
            status = exchange(near, socket).ask(job).status
        assert status == 429


def test_busy_object_servers_are_left_for_another_place(
    near, photos, without_worker
):
    path = near.put("busy.tar")
    # Neither proxy passes over both servers for an earlier test's fault.
    compute_again(near)
    until(lambda: without_worker.get(path, ASKED).ok, SECONDS)
    change_queue(near, 0.2)
    try:
        take_all_places(near)
        refused = without_worker.get(path, ASKED)
        assert refused.status_code == 429
        assert refused.json()["code"] == "share_exceeded"
        assert refused.headers["Retry-After"]
        answer = near.get(path)
        assert answer.status_code == 200, answer.text[:500]
        assert not computed_on(near, answer)
        take_all_places(near)
        epoch(near, photos, auth_url=f"{without_worker.proxy_url}/auth/v1.0")
    finally:
        change_queue(near, 20)
    until(lambda: without_worker.get(path, ASKED).ok, SECONDS)


def compute_again(near):
    """Waits until both object servers compute."""
    seen = set()

    def both():
        answer = near.get(near.put(f"again-{uuid.uuid4().hex}.tar"))
        seen.update(computed_on(near, answer))
        return len(seen) == 2

    until(both, SECONDS)


def put_on_both_servers(near, name, count):
    """Stores objects that have replicas on both that compute."""
    paths = []
    for number in range(20 * count):
        path = near.put(f"{name}-{number}.tar")
        places = replicas(near.cluster, path)
        if {*SERVERS[:2]} <= {replica.server for replica in places}:
            paths.append(path)
        if len(paths) == count:
            return paths
    raise AssertionError(f"{len(paths)} of {count} objects")


def test_requests_go_to_the_replica_with_the_shorter_queue(near):
    """Queued jobs at one worker are no reason to wait there."""
    compute_again(near)
    paths = put_on_both_servers(near, "queue", 12)
    worker = exchange(near, SOCKETS["object-worker"])
    job = replace(
        index_job("/AUTH_other/c/held", "0" * 32, 1),
        charged_account="AUTH_other",
    )
    for _ in range(3):  # unused grants last ten seconds
        assert worker.ask(job).status == 201
    started = time.monotonic()
    answers = [near.get(path) for path in paths]
    seconds = time.monotonic() - started
    assert [answer.status_code for answer in answers] == [200] * len(paths)
    until(lambda: all(computed_on(near, answer) for answer in answers))
    chosen = Counter(computed_on(near, answer)[0] for answer in answers)
    # What it says of its queue is asked for again after five seconds.
    assert chosen["object"] <= 2 + seconds / TOLD_SECONDS, (chosen, seconds)


# -- replicas ----------------------------------------------------------------


def of_computing_servers(near, path):
    return [
        replica
        for replica in replicas(near.cluster, path)
        if replica.server in SERVERS[:2]
    ]


def test_missing_replicas_are_left_for_another_place(near):
    path = near.put("missing.tar")
    near.get(path)
    *others, _ = replicas(near.cluster, path)
    for replica in others:
        replica.path.unlink()
        for _ in range(2):
            answer = near.get(path)
            assert_rows(near, answer)


def make_stale(near, path, content):
    """Writes a new version, and brings the old one back to one device."""
    old = replicas(near.cluster, path)[0]
    # A link keeps the attributes that are Swift's metadata.
    aside = old.path.parents[4] / uuid.uuid4().hex
    os.link(old.path, aside)
    near.owner.put(path, content)
    [new] = [
        replica
        for replica in replicas(near.cluster, path)
        if replica.device == old.device
    ]
    new.path.unlink()
    aside.rename(old.path)


@pytest.mark.parametrize("samples", [None, (1, 3)])
def test_stale_replica_does_not_end_an_epoch(near, samples):
    path = near.put("stale.tar", shard(2, seed=6))
    make_stale(near, path, CONTENT)
    etag = hashlib.md5(CONTENT).hexdigest()
    headers = {**ASKED, "X-Hapi-If-Source-Etag": etag}
    if samples:
        headers |= span_of(*samples)
    for caller in (near.owner, near.by_proxy):
        for _ in range(20):
            answer = caller.get(path, headers)
            assert answer.status_code == 200, answer.text[:300]
            assert answer.headers["X-Hapi-Source-Etag"].strip('"') == etag
    # One that is really gone is still an error.
    near.owner.put(path, shard(2, seed=7))
    answer = near.get(path, headers)
    assert (answer.status_code, answer.json()["code"]) == (
        412,
        "source_changed",
    )


@pytest.mark.parametrize("kind", ["loose", "segments"])
def test_old_replicas_of_parts_do_not_end_an_epoch(near, kind):
    """Nothing in the request names the version of each part."""
    container = f"/AUTH_test/near-{kind}"
    near.owner.put(container, headers={"X-Storage-Policy": "replicated"})
    place = Location(f"near-{kind}", "train")

    def put_old(name, content, old):
        path = f"{container}/{place.object_name(name)}"
        near.owner.put(path, old)
        make_stale(near, path, content)
        return path

    photos = [data for data, _ in jpegs(24, seed=11)]
    if kind == "loose":
        count = 12
        for number in range(count):
            name = f"class-{number % 2}/{number:02d}.jpg"
            put_old(name, photos[number], photos[number + count])
    else:
        data = shard(20, size=80)
        count, half = 20, len(data) // 2
        manifest = []
        for number, part in enumerate((data[:half], data[half:])):
            path = put_old(f"parts/{number}", part, bytes(half))
            manifest.append(
                {
                    "path": path.removeprefix("/AUTH_test"),
                    "etag": hashlib.md5(part).hexdigest(),
                    "size_bytes": len(part),
                }
            )
        url = f"{container}/{place.object_name('0.tar')}"
        url += "?multipart-manifest=put"
        body = json.dumps(manifest).encode()
        # It is refused while Swift looks at an old replica.
        until(lambda: near.owner.request("PUT", url, data=body).ok)
    with connected(near.cluster) as connection:

        def is_indexed():
            with contextlib.suppress(ConflictError):
                return update_index(connection, place)

        until(is_indexed)
        for cut in ("freeze", "stream"):
            with small_job(place, connection=connection, cut=cut) as job:
                for epoch_number in range(3):
                    loader = job.pipeline.loader(epoch_number)
                    assert sum(len(labels) for _, labels in loader) == count


def test_damaged_replica_is_put_aside_and_left_for_another_place(near):
    path = near.put("flipped.tar")
    for _ in range(2):  # both servers have the package then, or soon
        near.get(path)
    etag = near.owner.request("HEAD", path).headers["ETag"]
    damaged, *_ = of_computing_servers(near, path)
    flip(damaged.path)

    def refused():
        status, frames = ask(near, damaged, path, etag)
        assert status == 200
        code = read_error(frames[-1][1]).code
        if code == "model_needed":
            near.get(near.put(f"brings-{uuid.uuid4().hex}.tar"))
        return code == "source_damaged"

    until(refused, SECONDS)
    until(lambda: not damaged.path.exists())
    answer = near.get(path)
    assert_rows(near, answer)


def test_read_of_a_part_leaves_a_damaged_replica_and_puts_it_aside(near):
    """A read of a part never comes to the end, where Swift compares."""
    [path] = put_on_both_servers(near, "part", 1)
    rows = [*iter_samples(io.BytesIO(CONTENT), name="s")]
    asked = {
        **ASKED,
        **span_of(0, NUM_ROWS - 1),
        "X-Hapi-If-Source-Etag": hashlib.md5(CONTENT).hexdigest(),
        "X-Hapi-Crc32": ",".join(f"{row.crc32:08x}" for row in rows),
    }
    compute_again(near)
    answer = near.get(path, asked)
    until(lambda: computed_on(near, answer))
    first = computed_on(near, answer)[0]
    damaged = [
        replica
        for replica in replicas(near.cluster, path)
        if replica.server == first
    ]
    for replica in damaged:
        flip(replica.path)
    answer = near.get(path, asked)
    assert_rows(near, answer)
    until(
        lambda: not all(replica.path.exists() for replica in damaged),
        10,
        lambda: near.log(first)[-3000:] + near.log("swift")[-3000:],
    )
    assert f":{damaged[0].port} has a damaged replica" in near.log("swift")
    # The worker of a proxy reads it through Swift; its log names it as well.
    for replica in replicas(near.cluster, path):
        if replica.server != first:
            flip(replica.path)
    refused = near.by_proxy.get(path, asked)
    assert refused.status_code == 503, refused.text
    assert refused.json()["code"] == "source_damaged"


def flip(path):
    """Changes a bit of a stored object."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(data)


def test_overwritten_object_is_one_version_or_the_other(near):
    """Never a mix, whenever it is replaced."""
    path = near.put("changing.tar")
    contents = (CONTENT, shard(NUM_ROWS, seed=6))
    expected = [local_rows(near.frozen, 1, each, "any") for each in contents]
    etags = []
    for content in contents:
        near.owner.put(path, content)
        etags.append(near.owner.request("HEAD", path).headers["ETag"])
    stop = threading.Event()

    def overwrite():
        caller = Caller(near.cluster)
        while not stop.is_set():
            for content in contents:
                caller.put(path, content)
        caller.close()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(overwrite)
        try:
            for _ in range(25):
                answer = near.get(path)
                if answer.status_code == 503:
                    continue
                assert answer.status_code == 200, answer.text[:300]
                version = etags.index(answer.headers["X-Hapi-Source-Etag"])
                received_rows(answer.content).assert_equal(expected[version])
        finally:
            stop.set()
        running.result(SECONDS)


def test_deleted_object_is_not_found(near):
    path = near.put("deleted.tar")
    near.get(path)
    near.owner.request("DELETE", path).raise_for_status()
    answer = near.get(path)
    assert answer.status_code == 404
    assert answer.content == near.owner.get(path).content


# -- proxies without a worker ------------------------------------------------


@pytest.fixture(scope="module")
def without_worker(near, tmp_path_factory):
    """A user of a proxy that has object servers alone to compute."""
    options = {"places": "object", "worker_socket": "/nowhere.sock"}
    folder = tmp_path_factory.mktemp("alone")
    with second_proxy(near.cluster, folder, options) as url:
        caller = Caller(near.cluster, proxy_url=url)
        yield caller
        caller.close()


NUM_MANY = 70
MANY = f"{PLACE}?hapi"


@pytest.fixture(scope="module")
def many(near):
    """Names of more objects than one window has; two cannot be computed."""
    names = [f"many-{number}.jpg" for number in range(NUM_MANY)]
    photos = jpegs(NUM_MANY, seed=8)
    for name, (data, _) in zip(names, photos, strict=True):
        near.put(name, data)
    near.put("many-text", b"no image")
    return [*names[:3], "many-none.jpg", *names[3:], "many-text"]


def test_many_objects_are_computed_where_they_are(
    near, many, without_worker, crossed
):
    body = "\n".join(many).encode()
    encodings = ({}, {"X-Hapi-Encoding": "uint8"})
    for headers in ({**ASKED, **each} for each in encodings):
        answers = [
            each.request("POST", MANY, headers, body)
            for each in (near.by_proxy, near.owner, without_worker)
        ]
        expected = told(answers[0])
        assert [row.index for row, _ in expected[2]] == list(range(len(many)))
        for answer in answers[1:]:
            assert told(answer) == expected
            # A server writes its line when the answer has been read.
            both = ["object", "object-2"]
            until(lambda a=answer, b=both: computed_on(near, a) == b)
    entry = used(near.cluster, answers[1].headers["X-Trans-Id"])
    assert entry["objects"] == entry["samples"] == str(len(many))
    assert entry["errors"] == "2"
    assert entry["outcome"] == "done"
    assert entry["sent_bytes"] == str(len(answers[1].content))
    crossed(MANY, ASKED, body)
    sent, answer = crossed(MANY, ASKED, body)
    lengths = [len(data) for data, _ in jpegs(NUM_MANY, seed=8)]
    heads = 1000 * len(many)
    assert sent <= len(answer.content) + heads + sum(lengths) / 10


def test_many_objects_without_any_readable_one_are_not_found(near):
    for caller in (near.owner, near.by_proxy):
        body = b"many-none.jpg\nmany-none-2.jpg"
        answer = caller.request("POST", MANY, ASKED, body)
        assert answer.status_code == 404


def test_one_of_many_objects_is_missing_or_damaged_on_one_server(near, many):
    """It is read elsewhere; the others too, where they were together."""
    body = "\n".join(many[:10]).encode()
    expected = told(near.by_proxy.request("POST", MANY, ASKED, body))
    name = f"{PLACE}/{many[0]}"
    for replica in replicas(near.cluster, name):
        if replica.server == "object-3":
            continue
        file = replica.path
        kept, moved = file.read_bytes(), file.with_suffix(".moved")
        file.rename(moved)
        try:
            for _ in range(2):
                answer = near.owner.request("POST", MANY, ASKED, body)
                assert told(answer) == expected
        finally:
            moved.rename(file)
        assert file.read_bytes() == kept


def test_profiles_are_measured_on_an_object_server(near, without_worker):
    answer = without_worker.get(MODEL, {"X-Hapi-Profile": "true"})
    assert answer.status_code == 200, answer.text[:300]
    profile = ModelProfile.from_body(answer.content)
    assert profile.num_cuts == near.frozen.num_cuts
    head = without_worker.request("HEAD", MODEL, {"X-Hapi-Profile": "true"})
    assert head.headers["ETag"] == answer.headers["ETag"]


def test_doctor_asks_each_object_server(near, tmp_path):
    conf = near.cluster.directory / "etc" / "proxy-server.conf"
    relative = Path(os.path.relpath(conf))
    findings = {finding.state: finding for finding in node_findings(relative)}
    states = [finding.state for finding in node_findings(conf)]
    assert sorted(states) == sorted([OK, OK, WARNING])
    assert "0 jobs running" in findings[OK].found
    assert "no filter" in findings[WARNING].found
    key = tmp_path / "key"
    key.write_text("another key " * 4)
    key.chmod(0o600)
    lines = [
        line if "backend_key_file" not in line else f"backend_key_file = {key}"
        for line in conf.read_text().splitlines()
    ]
    other = tmp_path / "proxy-server.conf"
    other.write_text("\n".join(lines))
    refused = {finding.state: finding for finding in node_findings(other)}
    assert refused.keys() == {FAILURE, WARNING}
    assert "signature" in refused[FAILURE].found
    [missing] = node_findings(tmp_path / "none.conf")
    assert missing.state == FAILURE
    assert "none.conf" in missing.found


def test_refusal_names_what_is_missing_without_any_worker(
    near, tmp_path, without_worker
):
    options = {"places": "object", "object_silence_seconds": "1e-9"}
    with second_proxy(near.cluster, tmp_path, options) as url:
        caller = Caller(near.cluster, proxy_url=url)
        path = near.put("nobody.tar")
        answer = caller.get(path, ASKED)
        caller.close()
    assert answer.status_code == 503
    assert answer.json()["code"] == "worker_unavailable"
    assert answer.headers["Retry-After"]


@pytest.fixture(scope="module")
def sparse():
    """A user of six object servers, of which one computes; no other worker."""
    settings = {"object_servers": 6, "object_workers": 1, "worker": False}
    worker = {"device": "cpu"}
    with Cluster.temporary(
        layout="mixed", worker_options=worker, **settings
    ) as cluster:
        owner = Caller(cluster)
        for container, policy in ((PLACE, "replicated"), (EC_PLACE, "ec42")):
            owner.put(container, headers={"X-Storage-Policy": policy})
        owner.put(MODEL, package_bytes(small_parts().frozen))
        yield cluster, owner
        owner.close()


def test_objects_without_a_worker_at_their_replicas_are_computed(sparse):
    """Half of them have none; their bytes are sent to the one that has."""
    cluster, owner = sparse
    expected = local_rows(small_parts().frozen, 1, CONTENT, "any")
    with_worker = Counter()
    for number in range(12):
        path = f"{(PLACE, EC_PLACE)[number % 2]}/sparse-{number}.tar"
        owner.put(path, CONTENT)
        answer = owner.get(path, ASKED)
        assert answer.status_code == 200, answer.text[:500]
        received_rows(answer.content).assert_equal(expected)
        servers = [replica.server for replica in replicas(cluster, path)]
        with_worker["object" in servers] += 1
    assert len(with_worker) == 2, "the test needs both kinds of objects"
    body = "\n".join(f"sparse-{number}.jpg" for number in range(10)).encode()
    for number, (data, _) in enumerate(jpegs(10, seed=3)):
        owner.put(f"{PLACE}/sparse-{number}.jpg", data)
    many = owner.request("POST", MANY, ASKED, body)
    assert [row.error for row, _ in told(many)[2]] == [None] * 10


# -- load --------------------------------------------------------------------


def test_object_server_answers_others_while_it_reads_a_large_object(near):
    """A copy from disk to socket never waits, so it must give way."""
    content = large_shard()
    path = near.put("large.tar", content)
    busy = of_computing_servers(near, path)[0]
    etag = near.owner.request("HEAD", path).headers["ETag"]
    order = JobOrder(index_job(path, etag, len(content)), etag)
    waits = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            ask, near, busy, path, etag, message=order.to_body()
        )
        while not running.done():
            started = time.monotonic()
            answer = requests.get(
                f"http://127.0.0.1:{busy.port}/healthcheck", timeout=SECONDS
            )
            assert answer.ok
            waits.append(time.monotonic() - started)
        status, frames = running.result()
    assert status == 200
    assert frames[-1][0] is Kind.END
    # A whole read without giving way takes most of a second.
    assert len(waits) > 5, waits
    assert sorted(waits)[len(waits) // 2] < 0.2, waits


def large_shard():
    """A shard of 200 MB with few samples."""
    sink = io.BytesIO()
    noise = os.urandom(1 << 20) * 10
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for number in range(20):
            info = tarfile.TarInfo(f"{number:03d}.jpg")
            info.size = len(noise)
            tar.addfile(info, io.BytesIO(noise))
    return sink.getvalue()


def test_nothing_runs_on_after_the_client_has_gone(near):
    path = near.put("gone.tar", shard(400, seed=3, size=120))
    near.get(path, {**ASKED, "X-Hapi-Samples": "0-1"})
    answer = near.owner.stream(path, ASKED)
    assert answer.status_code == 200
    answer.raw.read(1000)
    answer.close()
    entry = used(near.cluster, answer.headers["X-Trans-Id"])
    assert entry["outcome"] in ("gone", "done")
    for worker in ("object-worker", "object-2-worker"):
        until(lambda worker=worker: streams(near, worker) == 0)


def streams(near, worker):
    """Streams that a worker has now."""
    answer = exchange(near, SOCKETS[worker]).request(
        "GET", "/status", admin=True
    )
    return sum(account["streams"] for account in answer.fields["accounts"])


SOCKETS = {"object-worker": "o1.sock", "object-2-worker": "o2.sock"}


def test_first_requests_for_a_model_upload_it_once(near):
    frozen = small_parts(seed=77).frozen
    model = f"{PLACE}/once.hapi"
    near.owner.put(model, package_bytes(frozen))
    path = near.put("once.tar")

    def get(_):
        caller = Caller(near.cluster)
        try:
            return caller.get(path, {**ASKED, "X-Hapi-Model": model})
        finally:
            caller.close()

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(get, range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    digest = digest_of(frozen)
    loads = {
        name: near.log(f"{name}-worker").count(f"model {digest[:12]}")
        for name in SERVERS[:2]
    }
    assert max(loads.values()) == 1, loads


@pytest.mark.usefixtures("frequent_plans")
def test_plan_counts_the_workers_that_serve_it(near, photos):
    place, _ = photos
    with (
        slow_link(near.cluster.auth_url, 200_000) as url,
        connected(near.cluster, auth_url=url) as connection,
        small_job(
            place,
            connection=connection,
            batch_size=8,
            epochs=1e6,
        ) as job,
    ):
        deadline = time.monotonic() + SECONDS
        for number in itertools.count():
            if job.pipeline.plan.planner._estimates.num_workers == 2:
                break
            assert time.monotonic() < deadline, job.no_plan_reason
            for _ in job.pipeline.loader(number):
                pass
        conditions = job.pipeline.plan.planner._estimates.conditions()
        assert conditions.server_capacity == 2 * conditions.server_share
