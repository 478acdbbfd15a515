"""Wrong requests, through the real proxy and worker."""

import io
from types import SimpleNamespace

import pytest
import requests

from caller import metrics
from hapi_protocol.encodings import ENCODINGS
from hapi_protocol.feature_reader import read_features
from photos import shard, tar_of

CONTAINER = "bad-input"
ROOT = f"/AUTH_test/{CONTAINER}"
NONE, EMPTY = (f"models/{name}.hapi" for name in ("none", "empty"))
OUTSIDE = "samples_out_of_range"


@pytest.fixture(scope="module")
def chain(cluster, owner, small_model):
    """A data set and a package on the cluster, and who asks."""
    model, frozen = small_model
    headers = {"X-Hapi-Model": model, "X-Hapi-Cut": str(frozen.num_cuts)}
    good = shard(4)
    owner.put(ROOT)
    for path, data in {
        f"{ROOT}/good.tar": good,
        f"{ROOT}/empty.tar": tar_of([]),
        f"{ROOT}/empty": b"",
        f"{ROOT}/cut-off.tar": good[:5000],
        f"{ROOT}/text.txt": b"neither tar nor image\n" * 100,
        "/AUTH_test/models/empty.hapi": b"",
    }.items():
        owner.put(path, data)

    def ask(name, method="GET", **changed):
        named = {key.replace("_", "-"): v for key, v in changed.items()}
        return owner.request(method, f"{ROOT}/{name}", {**headers, **named})

    etag = owner.request("HEAD", f"{ROOT}/good.tar").headers["Etag"]
    return SimpleNamespace(ask=ask, headers=headers, etag=etag)


def test_good_request_is_answered_with_features(chain):
    answer = chain.ask("good.tar")
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Hapi-Source-Etag"] == chain.etag
    assert answer.headers["Cache-Control"] == "private, no-store"
    assert answer.headers["ETag"].startswith('W/"')
    assert "Content-Length" not in answer.headers
    assert "Last-Modified" not in answer.headers
    reader = read_features(io.BytesIO(answer.content))
    rows = [row for batch in reader for row in batch.rows]
    assert [row.index for row in rows] == [0, 1, 2, 3]
    assert [row.label for row in rows] == [0, 1, 2, 3]
    assert reader.summary.rows == 4


@pytest.mark.parametrize(
    ("name", "changed", "status", "code", "said"),
    [
        # Refused by the filter.
        ("good.tar", {"X-Hapi-Cut": "0"}, 400, "bad_cut", "'0'"),
        ("good.tar", {"X-Hapi-Cut": "999"}, 422, "cut_out_of_range", "999"),
        (
            "good.tar",
            {"X-Hapi-If-Source-Etag": "0" * 32},
            412,
            "source_changed",
            "0" * 32,
        ),
        ("good.tar", {"X-Hapi-Model": NONE}, 404, "not_found", "none.hapi"),
        # Refused by the worker.
        ("good.tar", {"X-Hapi-Model": EMPTY}, 422, "bad_package", EMPTY),
        ("good.tar", {"X-Hapi-Samples": "9-"}, 422, OUTSIDE, "9"),
        ("text.txt", {}, 422, "unsupported_object", "text.txt"),
        ("empty", {}, 422, "unsupported_object", "empty"),
        ("empty.tar", {}, 422, "empty_shard", "empty.tar"),
    ],
)
def test_bad_input_gets_its_own_error(
    chain, name, changed, status, code, said
):
    answer = chain.ask(name, **changed)
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["code"] == code
    assert said in body["message"]
    assert body["trans_id"] == answer.headers["X-Trans-Id"]


def test_head_has_the_headers_of_the_get_and_computes_nothing(chain, cluster):
    etag = chain.ask("good.tar").headers["ETag"]
    before = metrics(cluster)
    answer = chain.ask("good.tar", "HEAD")
    assert answer.status_code == 200
    assert answer.headers["ETag"] == etag
    assert answer.headers["X-Hapi-Source-Etag"] == chain.etag
    samples = "hapi_worker_samples_total"
    assert metrics(cluster)[samples] == before[samples]

    known = chain.ask("good.tar", If_None_Match=etag)
    refused = chain.ask("good.tar", "HEAD", X_Hapi_Cut="zero")
    assert (known.status_code, refused.status_code) == (304, 400)
    assert known.content == refused.content == b""


def test_shard_that_is_cut_off_never_ends_cleanly(chain):
    """Refused before the first row, or a connection that breaks."""
    try:
        answer = chain.ask("cut-off.tar")
    except requests.exceptions.ChunkedEncodingError:
        return
    assert answer.status_code == 422
    assert answer.json()["code"] == "damaged_shard"


def test_copy_with_annotation_copies_the_bytes(chain, owner):
    headers = {**chain.headers, "Destination": f"{CONTAINER}/copied.tar"}
    answer = owner.request("COPY", f"{ROOT}/good.tar", headers)
    assert answer.status_code == 201
    headers = {**chain.headers, "X-Copy-From": f"{CONTAINER}/good.tar"}
    owner.put(f"{ROOT}/copied-too.tar", headers=headers)
    source = owner.get(f"{ROOT}/good.tar").content
    assert owner.get(f"{ROOT}/copied.tar").content == source
    assert owner.get(f"{ROOT}/copied-too.tar").content == source


def test_info_tells_the_limits(cluster):
    url = f"{cluster.proxy_url}/info"
    section = requests.get(url, timeout=300).json()["hapi"]
    assert section["version"] == 1
    assert section["versions"] == [1]
    assert section["encodings"] == list(ENCODINGS)
    assert section["max_object_bytes"] > 0
