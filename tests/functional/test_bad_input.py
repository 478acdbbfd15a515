"""Wrong requests, through the real proxy and worker."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pytest
import torch

from caller import Caller, metrics
from hapi_client import Connection, Credentials
from hapi_client.model.package_store import upload_package
from hapi_cluster import Cluster
from hapi_protocol.encodings import ENCODINGS
from hapi_protocol.feature_reader import read_features
from hapi_splitter.freezing.split_model import split
from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.package.writer import write_package
from networks import small_network, small_transform
from photos import photo, shard, tar_of

ACCOUNT = "AUTH_test"
CONTAINER = "bad-input"


@dataclass
class Chain:
    """A data set and a package on the cluster, and who asks."""

    cluster: Cluster
    caller: Caller
    model: str
    num_cuts: int
    shard_etag: str

    def annotated(self, name, changed):
        headers = {
            "X-Hapi-Model": self.model,
            "X-Hapi-Cut": str(self.num_cuts),
            **changed,
        }
        given = {k: v for k, v in headers.items() if v is not None}
        return self.caller.get(f"/{ACCOUNT}/{CONTAINER}/{name}", given)


@pytest.fixture(scope="module")
def chain(cluster, tmp_path_factory):
    caller = Caller(cluster)
    credentials = Credentials.v1(cluster.auth_url, cluster.user, cluster.key)
    parts = split(small_network(), "body", transform=small_transform())
    path = tmp_path_factory.mktemp("package") / "model.hapi"
    info = write_package(parts.frozen, path)
    with Connection(credentials) as connection:
        model, _ = upload_package(connection, "models", path, info.digest)
    root = f"/{ACCOUNT}/{CONTAINER}"
    caller.put(root)
    good = shard(4)
    caller.put(f"{root}/good.tar", good)
    caller.put(f"{root}/empty.tar", tar_of([]))
    caller.put(f"{root}/empty", b"")
    caller.put(f"{root}/cut-off.tar", good[:5000])
    caller.put(f"{root}/text.txt", b"neither tar nor image\n" * 100)
    caller.put(f"{root}/no-image.tar", tar_of([("a.txt", b"hello")]))
    caller.put(f"/{ACCOUNT}/models/garbage.hapi", b"x" * 5000)
    caller.put(f"/{ACCOUNT}/models/empty.hapi", b"")
    etag = caller.request("HEAD", f"{root}/good.tar").headers["Etag"]
    yield Chain(cluster, caller, model.quoted(), parts.frozen.num_cuts, etag)
    caller.close()


def test_good_request_is_answered_with_features(chain):
    answer = chain.annotated("good.tar", {})
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Hapi-Source-Etag"] == chain.shard_etag
    assert answer.headers["Cache-Control"] == "private, no-store"
    assert answer.headers["ETag"].startswith('W/"')
    assert "Content-Length" not in answer.headers
    assert "Last-Modified" not in answer.headers
    reader = read_features(io.BytesIO(answer.content))
    rows = [row for batch in reader for row in batch.rows]
    assert [row.index for row in rows] == [0, 1, 2, 3]
    assert [row.label for row in rows] == [0, 1, 2, 3]
    assert reader.summary.rows == 4


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_single_image_is_one_sample(chain, kind):
    sink = io.BytesIO()
    photo("coffee.png").save(sink, kind)
    path = f"/{ACCOUNT}/{CONTAINER}/coffee.{kind.lower()}"
    chain.caller.put(path, sink.getvalue())
    answer = chain.annotated(
        f"coffee.{kind.lower()}", {"X-Hapi-Encoding": "float16"}
    )
    assert answer.status_code == 200, answer.text
    (batch,) = list(read_features(io.BytesIO(answer.content)))
    assert [(row.index, row.key) for row in batch.rows] == [(0, "coffee")]
    assert batch.features.dtype == "float16"
    whole = small_network().eval()
    pixels = small_transform()(decode_image(sink.getvalue()))
    with torch.inference_mode():
        expected = whole.pool(whole.body(pixels[None])).flatten(1)
    torch.testing.assert_close(
        torch.from_numpy(batch.features).float(),
        expected,
        rtol=2e-3,
        atol=1e-3,
    )


@pytest.mark.parametrize(
    ("name", "changed", "status", "code", "said"),
    [
        ("good.tar", {"X-Hapi-Cut": "999"}, 422, "cut_out_of_range", "999"),
        ("good.tar", {"X-Hapi-Cut": "0"}, 400, "bad_cut", "'0'"),
        ("good.tar", {"X-Hapi-Cut": None}, 400, "bad_cut", "missing"),
        ("good.tar", {"X-Hapi-Model": None}, 400, "bad_model", "missing"),
        ("good.tar", {"X-Hapi-Model": "models"}, 400, "bad_model", "models"),
        (
            "good.tar",
            {"X-Hapi-Model": "models/none.hapi"},
            404,
            "not_found",
            "none.hapi",
        ),
        (
            "good.tar",
            {"X-Hapi-Model": "models/garbage.hapi"},
            422,
            "bad_package",
            "",
        ),
        (
            "good.tar",
            {"X-Hapi-Model": "models/empty.hapi"},
            422,
            "bad_package",
            "empty.hapi",
        ),
        (
            "good.tar",
            {"X-Hapi-Encoding": "int4"},
            400,
            "unknown_encoding",
            "float32, float16",
        ),
        (
            "good.tar",
            {"X-Hapi-Transform": "rotate"},
            400,
            "unknown_transform",
            "eval",
        ),
        (
            "good.tar",
            {"X-Hapi-Numerics": "fast"},
            422,
            "unsupported_numerics",
            "exact",
        ),
        ("good.tar", {"X-Hapi-Colour": "red"}, 400, "bad_annotation", "Colo"),
        ("good.tar", {"Range": "bytes=0-9"}, 400, "range_not_allowed", "Ran"),
        (
            "good.tar",
            {"If-Match": '"x"'},
            400,
            "conditional_not_allowed",
            "If-Match",
        ),
        (
            "good.tar",
            {"X-Hapi-Samples": "9-"},
            422,
            "samples_out_of_range",
            "9",
        ),
        ("good.tar", {"X-Hapi-Samples": "x"}, 400, "bad_samples", "'x'"),
        (
            "good.tar",
            {"X-Hapi-If-Source-Etag": "0" * 32},
            412,
            "source_changed",
            "0" * 32,
        ),
        ("text.txt", {}, 422, "unsupported_object", "text.txt"),
        ("empty", {}, 422, "unsupported_object", "empty"),
        ("empty.tar", {}, 422, "empty_shard", "empty.tar"),
        ("missing.tar", {}, 404, None, ""),
    ],
)
def test_bad_input_gets_its_own_error(
    chain, name, changed, status, code, said
):
    answer = chain.annotated(name, changed)
    assert answer.status_code == status, answer.text
    if code is None:
        plain = chain.annotated(
            name, {"X-Hapi-Model": None, "X-Hapi-Cut": None}
        )
        assert plain.status_code == status
        assert answer.content == plain.content
        return
    body = answer.json()
    assert body["code"] == code
    assert said in body["message"]
    assert body["trans_id"] == answer.headers["X-Trans-Id"]


def test_head_is_refused_with_the_status_of_the_get(chain):
    path = f"/{ACCOUNT}/{CONTAINER}/good.tar"
    headers = {"X-Hapi-Model": chain.model, "X-Hapi-Cut": "zero"}
    answer = chain.caller.request("HEAD", path, headers)
    assert answer.status_code == 400
    assert answer.content == b""


def test_head_computes_nothing_and_gives_the_headers(chain):
    get = chain.annotated("good.tar", {})
    before = metrics(chain.cluster)
    path = f"/{ACCOUNT}/{CONTAINER}/good.tar"
    headers = {
        "X-Hapi-Model": chain.model,
        "X-Hapi-Cut": str(chain.num_cuts),
    }
    answer = chain.caller.request("HEAD", path, headers)
    assert answer.status_code == 200
    assert answer.headers["ETag"] == get.headers["ETag"]
    assert answer.headers["X-Hapi-Source-Etag"] == chain.shard_etag
    after = metrics(chain.cluster)
    samples = "hapi_worker_samples_total"
    assert after[samples] == before[samples]


def test_if_none_match_of_the_stream_is_304(chain):
    etag = chain.annotated("good.tar", {}).headers["ETag"]
    answer = chain.annotated("good.tar", {"If-None-Match": etag})
    assert answer.status_code == 304
    assert answer.content == b""


def test_sample_without_an_image_is_a_row_with_an_error(chain):
    answer = chain.annotated("no-image.tar", {})
    assert answer.status_code == 200, answer.text
    (batch,) = list(read_features(io.BytesIO(answer.content)))
    assert batch.rows[0].key == "a"
    assert "image" in batch.rows[0].error


def test_shard_that_is_cut_off_never_ends_cleanly(chain):
    """Refused before the first row, or a connection that breaks."""
    import requests

    try:
        answer = chain.annotated("cut-off.tar", {})
    except requests.exceptions.ChunkedEncodingError:
        return
    assert answer.status_code == 422
    assert answer.json()["code"] == "damaged_shard"


def test_copy_with_annotation_copies_the_bytes(chain):
    root = f"/{ACCOUNT}/{CONTAINER}"
    headers = {
        "X-Hapi-Model": chain.model,
        "X-Hapi-Cut": "1",
        "Destination": f"{CONTAINER}/copied.tar",
    }
    answer = chain.caller.request("COPY", f"{root}/good.tar", headers)
    assert answer.status_code == 201
    chain.caller.put(
        f"{root}/copied-too.tar",
        headers={
            "X-Hapi-Model": chain.model,
            "X-Hapi-Cut": "1",
            "X-Copy-From": f"{CONTAINER}/good.tar",
        },
    )
    source = chain.caller.get(f"{root}/good.tar").content
    assert chain.caller.get(f"{root}/copied.tar").content == source
    assert chain.caller.get(f"{root}/copied-too.tar").content == source


def test_object_over_the_limit_is_refused_with_the_numbers(tmp_path):
    with Cluster.temporary(
        worker=False, filter_options={"max_object_bytes": "1000"}
    ) as cluster:
        caller = Caller(cluster)
        caller.put(f"/{ACCOUNT}/c")
        caller.put(f"/{ACCOUNT}/c/big.tar", b"x" * 1001)
        caller.put(f"/{ACCOUNT}/c/model.hapi", b"x" * 100)
        answer = caller.get(
            f"/{ACCOUNT}/c/big.tar",
            {"X-Hapi-Model": "c/model.hapi", "X-Hapi-Cut": "1"},
        )
        assert answer.status_code == 413
        assert answer.json()["code"] == "object_too_large"
        assert answer.json()["max_object_bytes"] == 1000
        small = caller.get(
            f"/{ACCOUNT}/c/model.hapi",
            {"X-Hapi-Model": "c/model.hapi", "X-Hapi-Cut": "1"},
        )
        caller.close()
    assert small.status_code == 503
    assert small.json()["code"] == "worker_unavailable"
    assert int(small.headers["Retry-After"]) >= 1


def test_info_tells_the_limits(chain):
    import requests

    url = f"{chain.cluster.proxy_url}/info"
    section = requests.get(url, timeout=30).json()["hapi"]
    assert section["version"] == 1
    assert section["versions"] == [1]
    assert section["encodings"] == list(ENCODINGS)
    assert section["max_object_bytes"] > 0
