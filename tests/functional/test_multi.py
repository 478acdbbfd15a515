"""Requests for many objects, with real Swift and the real worker."""

from __future__ import annotations

import io
import json
import os
import random
from contextlib import closing
from dataclasses import dataclass, field
from urllib.parse import quote

import numpy as np
import pytest
import torch

from access_lines import used
from caller import Caller, metrics
from hapi_client import Connection
from hapi_cluster import Cluster
from hapi_protocol.errors import RightsError
from hapi_protocol.feature_reader import read_features
from hapi_protocol.headers import CONTENT_TYPE_STREAM, Annotation, ModelPath
from hapi_splitter.freezing.split_model import SplitModel
from hapi_splitter.inputs.image_decode import decode_image
from jobs import store_package
from many_objects import get_many
from networks import small_parts
from photos import jpegs, shard
from waiting import until

OWNER, OTHER = "AUTH_test", "AUTH_test2"
DATA = f"/{OWNER}/many"
PRIVATE, MODELS = f"/{OWNER}/many-private", f"/{OWNER}/many-models"
READER, STRANGER = "test:tester3", "test2:tester2"
NUM_IMAGES = 12
MAX_OBJECTS = 1000
LARGE_BYTES = 17 * 1024 * 1024
STRANGE = "a b.jpg", "ü/日.jpg", "new\nline.jpg", "what?.jpg", "100%.jpg"


@dataclass
class Stocked:
    """A cluster with objects of all kinds, and its owner."""

    cluster: Cluster
    owner: Caller
    connection: Connection
    model: ModelPath
    parts: SplitModel
    images: dict[str, bytes] = field(default_factory=dict)

    @property
    def annotation(self):
        return Annotation(self.model, 1)

    def get_many(self, names):
        return list(self.rows(names))

    def rows(self, names, container="many"):
        return get_many(self.connection, container, names, self.annotation)

    def post(self, names, caller=None, headers=None, **options):
        """Sends a request like any tool; ``names`` or a body."""
        if isinstance(names, list):
            names = "\n".join(map(quote, names)).encode()
        if headers is None:
            headers = self.annotation.to_headers()
        requester = caller or self.owner
        path = f"{DATA}?hapi"
        return requester.request("POST", path, headers, names, **options)

    def features(self, names):
        """Computed here, one batch, eagerly."""
        frozen = self.parts.frozen
        images = [decode_image(self.images[name]) for name in names]
        with torch.inference_mode():
            return frozen.prefix(1)(
                torch.stack([frozen.transform(image) for image in images])
            )

    def allow(self, acl, *containers):
        for path in containers:
            self.owner.put(path, headers={"X-Container-Read": acl})


@pytest.fixture(scope="module")
def stocked(cluster, connection, owner, tmp_path_factory):
    parts = small_parts(seed=7)
    folder = tmp_path_factory.mktemp("package")
    model = store_package(connection, folder, parts.frozen, "many-models")
    stocked = Stocked(cluster, owner, connection, model, parts)
    stock(stocked)
    return stocked


def stock(stocked):
    owner = stocked.owner
    for path in (DATA, PRIVATE):
        owner.put(path)
    for number, (data, _) in enumerate(jpegs(NUM_IMAGES, size=90, seed=4)):
        stocked.images[f"{number}.jpg"] = data
    images = list(stocked.images.values())
    stocked.images |= dict(zip(STRANGE, images, strict=False))
    for name, data in stocked.images.items():
        owner.put(f"{DATA}/{quote(name)}", data)
    array = io.BytesIO()
    np.save(array, np.zeros(9))
    others = {
        "garbage": b"garbage " * 1000,
        "shard.tar": shard(3, size=60),
        "array.npy": array.getvalue(),
        "empty": b"",
        "large": bytes(LARGE_BYTES),
        "cut.jpg": stocked.images["0.jpg"][:500],
    }
    for name, data in others.items():
        owner.put(f"{DATA}/{name}", data)
    assemble(stocked)


def assemble(stocked):
    """Objects that Swift makes of others: SLO, DLO, symlinks."""
    owner, whole = stocked.owner, stocked.images["1.jpg"]
    half = len(whole) // 2
    owner.put(f"{PRIVATE}/secret.jpg", whole)
    owner.put(f"{PRIVATE}/part/0", whole[:half])
    owner.put(f"{PRIVATE}/part/1", whole[half:])
    parts = [{"path": f"/many-private/part/{n}"} for n in (0, 1)]
    manifest = json.dumps(parts).encode()
    owner.put(f"{DATA}/slo.jpg?multipart-manifest=put", manifest)
    for name, header, target in (
        ("dlo.jpg", "X-Object-Manifest", "many-private/part/"),
        ("link.jpg", "X-Symlink-Target", "many/1.jpg"),
        ("private-link.jpg", "X-Symlink-Target", "many-private/secret.jpg"),
    ):
        owner.put(f"{DATA}/{name}", b"", {header: target})
    for name in ("slo.jpg", "dlo.jpg", "link.jpg", "private-link.jpg"):
        stocked.images[name] = whole


def rows_of(answer):
    assert answer.status_code == 200, answer.text
    batches = list(read_features(answer.content))
    return [row for batch in batches for row in batch.rows]


def plain(caller, name):
    return caller.get(f"{DATA}/{quote(name)}")


def assert_same(found, wanted):
    torch.testing.assert_close(
        torch.stack([each.features for each in found]),
        wanted,
        rtol=1e-4,
        atol=1e-5 * float(wanted.abs().max()),
    )


def test_features_are_those_of_the_images_in_any_order(
    stocked,
):
    names = list(stocked.images) * 2
    random.Random(0).shuffle(names)
    found = stocked.get_many(names)

    assert [each.name for each in found] == names
    assert {(each.status, each.error) for each in found} == {(200, None)}
    assert_same(found, stocked.features(names))
    etags = {each.name: each.etag for each in found}
    for name in stocked.images:
        answer = plain(stocked.owner, name)
        assert etags[name] == answer.headers["ETag"].strip('"')


def test_objects_that_cannot_be_used_are_rows_among_the_others(
    stocked,
):
    wanted = {
        "0.jpg": (200, None),
        "none": (404, "not_found"),
        "garbage": (200, "unsupported_object"),
        "shard.tar": (200, "unsupported_object"),
        "2.jpg": (200, None),
        "array.npy": (200, "unsupported_object"),
        "empty": (200, "unsupported_object"),
        "large": (413, "object_too_large"),
        "cut.jpg": (200, "unsupported_object"),
        "slo.jpg": (200, None),
    }
    found = stocked.get_many(list(wanted))

    assert {e.name: (e.status, e.code) for e in found} == wanted
    good = [each for each in found if each.error is None]
    assert_same(good, stocked.features([each.name for each in good]))


@pytest.fixture
def shared(stocked):
    """Lets users read the data and the models, until the test's end."""
    yield lambda acl: stocked.allow(acl, DATA, MODELS)
    stocked.allow("", DATA, MODELS)


@pytest.mark.parametrize(
    ("user", "account"), [(READER, OWNER), (STRANGER, OTHER)]
)
def test_rows_say_what_the_callers_own_gets_say(
    stocked, shared, user, account
):
    """Readers have no right to write, and none on what lies elsewhere."""
    shared(user)
    names = ["0.jpg", "none", "private-link.jpg", "slo.jpg", "link.jpg"]
    with closing(Caller(stocked.cluster, user)) as caller:
        expected = [plain(caller, name).status_code for name in names]
        answer = stocked.post(names, caller)
    rows = rows_of(answer)

    assert expected == [200, 404, 403, 409, 200]
    assert [json.loads(row.meta)["status"] for row in rows] == expected
    errors = [row.error is None for row in rows]
    assert errors == [status == 200 for status in expected]
    trans_id = answer.headers["X-Trans-Id"]
    assert used(stocked.cluster, trans_id)["account"] == account


def test_container_that_is_not_there_is_not_found(stocked):
    with pytest.raises(RightsError) as caught:
        next(stocked.rows(["0.jpg"], "nowhere"))
    assert caught.value.status == 404


def test_container_is_never_changed(stocked):
    changes = {"X-Container-Read": ".r:*", "X-Container-Meta-Colour": "red"}
    for headers in ({}, stocked.annotation.to_headers()):
        answer = stocked.post(["0.jpg"], headers={**headers, **changes})
        assert answer.status_code == (200 if headers else 400)
    found = stocked.owner.request("HEAD", DATA).headers

    assert "X-Container-Meta-Colour" not in found
    assert found.get("X-Container-Read", "") == ""


def test_body_may_be_chunked(stocked):
    pieces = [b"0.j", b"pg\nno", b"ne\n1.jpg"]
    answer = stocked.post(iter(pieces))

    assert [row.key for row in rows_of(answer)] == ["0.jpg", "none", "1.jpg"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "bad_names"),
        (b"0.jpg\n%00secret", 400, "bad_names"),
        (b"0.jpg\n" * (MAX_OBJECTS + 1), 413, "request_too_large"),
        (b"x" * 4_000_000, 413, "request_too_large"),
    ],
)
@pytest.mark.parametrize("is_chunked", [False, True])
def test_body_without_proper_names_is_refused(
    stocked, body, status, code, is_chunked
):
    """And the connection can be used again."""
    answer = stocked.post(iter([body] if body else []) if is_chunked else body)

    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert plain(stocked.owner, "0.jpg").status_code == 200


def test_most_names_are_read_and_one_that_is_deleted_meanwhile_is_a_row(
    stocked,
):
    stocked.owner.put(f"{DATA}/doomed.jpg", stocked.images["0.jpg"])
    names = [f"{n % NUM_IMAGES}.jpg" for n in range(MAX_OBJECTS - 1)]
    rows = stocked.rows([*names, "doomed.jpg"])
    first = next(rows)
    stocked.owner.request("DELETE", f"{DATA}/doomed.jpg").raise_for_status()
    found = [first, *rows]

    assert [each.name for each in found] == [*names, "doomed.jpg"]
    assert {each.error for each in found[:-1]} == {None}
    assert (found[-1].status, found[-1].code) == (404, "not_found")
    assert_same(found[:NUM_IMAGES], stocked.features(names[:NUM_IMAGES]))


def test_answer_says_nothing_of_the_container_and_is_in_the_access_log(
    stocked,
):
    names = ["0.jpg", "none", "garbage", "1.jpg"]
    answer = stocked.post(names)
    entry = used(stocked.cluster, answer.headers["X-Trans-Id"])

    assert answer.headers["Content-Type"] == CONTENT_TYPE_STREAM
    assert answer.headers["Cache-Control"] == "private, no-store"
    assert answer.headers["Transfer-Encoding"] == "chunked"
    for name in ("ETag", "X-Hapi-Source-Etag", "Last-Modified"):
        assert name not in answer.headers
    assert not [n for n in answer.headers if n.startswith("X-Container-")]
    assert entry["model"] == stocked.model.quoted()
    assert (entry["cut"], entry["account"], entry["objects"]) == (
        "1",
        OWNER,
        "4",
    )
    assert (entry["samples"], entry["errors"]) == ("4", "2")
    assert entry["sent_bytes"] == str(len(answer.content))
    assert entry["outcome"] == "done"
    assert float(entry["decode_seconds"]) > 0


def num_descriptors(cluster):
    pid = cluster.status()["children"]["swift"]["pid"]
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_client_that_leaves_leaves_nothing_behind(stocked):
    cluster = stocked.cluster
    before = num_descriptors(cluster)
    names = [f"{n % NUM_IMAGES}.jpg" for n in range(600)]
    with (
        closing(Caller(cluster)) as caller,
        stocked.post(names, caller, stream=True) as answer,
    ):
        assert answer.status_code == 200
        assert answer.raw.read(1000)
        trans_id = answer.headers["X-Trans-Id"]
    entry = used(cluster, trans_id)

    assert entry["outcome"] == "gone"
    assert int(entry["samples"]) < 600
    until(lambda: metrics(cluster)["hapi_worker_jobs_running"] == 0)
    # Swift may keep a few until its garbage is collected.
    until(lambda: num_descriptors(cluster) <= before + 4)
    reads = sum(
        trans_id in line.split() and "HP" in line.split() and "GET" in line
        for line in cluster.log("swift").read_text().splitlines()
    )
    assert reads < 600
