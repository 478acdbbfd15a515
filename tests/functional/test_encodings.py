"""Encodings over the whole chain: bounds, order, rows with an error."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import pytest

from caller import Caller
from hapi_client import Connection, Credentials
from hapi_client.model.package_store import upload_package
from hapi_protocol.encodings import num_groups
from hapi_protocol.feature_reader import read_features
from hapi_splitter.encodings import decode
from hapi_splitter.freezing.split_model import split
from hapi_splitter.package.writer import write_package
from networks import small_network, small_transform
from photos import shard, with_corrupt_member

ACCOUNT = "AUTH_test"
CONTAINER = "encodings"
NUM_SAMPLES = 12
BAD = 3


@dataclass
class Chain:
    caller: Caller
    headers: dict[str, str]

    def features(self, encoding):
        """Decoded features, all rows, and the bytes of the answer."""
        headers = dict(self.headers)
        if encoding is not None:
            headers["X-Hapi-Encoding"] = encoding
        answer = self.caller.get(f"/{ACCOUNT}/{CONTAINER}/a.tar", headers)
        assert answer.status_code == 200, answer.text
        batches = list(read_features(io.BytesIO(answer.content)))
        pieces = [
            decode(b.features, encoding or "float32", b.scale, b.zero).numpy()
            for b in batches
            if b.features is not None
        ]
        rows = [row for batch in batches for row in batch.rows]
        return np.concatenate(pieces), rows, len(answer.content)


@pytest.fixture(scope="module")
def chain(cluster, tmp_path_factory):
    caller = Caller(cluster)
    credentials = Credentials.v1(cluster.auth_url, cluster.user, cluster.key)
    frozen = split(small_network(), "body", transform=small_transform()).frozen
    path = tmp_path_factory.mktemp("package") / "model.hapi"
    info = write_package(frozen, path)
    with Connection(credentials) as connection:
        model, _ = upload_package(connection, "models", path, info.digest)
    caller.put(f"/{ACCOUNT}/{CONTAINER}")
    data = with_corrupt_member(shard(NUM_SAMPLES), f"s0-{BAD:04d}")
    caller.put(f"/{ACCOUNT}/{CONTAINER}/a.tar", data)
    headers = {"X-Hapi-Model": model.quoted(), "X-Hapi-Cut": "1"}
    yield Chain(caller, headers)
    caller.close()


@pytest.fixture(scope="module")
def exact(chain):
    """Answer to a client without support of encodings."""
    return chain.features(None)


def bound(dtype, exact):
    """The published bound of each value, or of each group's values."""
    groups = num_groups(exact.shape[1:])
    assert groups > 1, "the cut has large channels"
    x = exact.astype(np.float64).reshape(len(exact), groups, -1)
    if dtype == "uint8":
        low, high = x.min(2, keepdims=True), x.max(2, keepdims=True)
        largest = np.maximum(abs(low), abs(high))
        found = (high - low) / 510 + 2**-21 * largest + 2.0**-142
    elif dtype == "bfloat16":
        found = np.maximum(2**-8 * abs(x), 2.0**-134)
    else:
        found = np.maximum(2**-11 * abs(x), 2.0**-25)
    # Two forward passes may run in batches of different sizes.
    return found + 1e-5 * abs(x).max()


@pytest.mark.parametrize("encoding", ["uint8;zstd", "bfloat16;lz4", "float16"])
def test_features_are_within_the_bound_of_their_encoding(
    chain, exact, encoding
):
    features, rows, num_bytes = chain.features(encoding)
    wanted, wanted_rows, exact_bytes = exact
    assert rows == wanted_rows
    assert [row.index for row in rows] == list(range(NUM_SAMPLES))
    assert [row.index for row in rows if row.error] == [BAD]
    assert features.shape == wanted.shape
    assert len(features) == NUM_SAMPLES - 1
    limit = bound(encoding.partition(";")[0], wanted)
    error = np.abs(features.astype(np.float64) - wanted)
    assert (error.reshape(*limit.shape[:2], -1) <= limit).all()
    assert error.max() > 0
    assert num_bytes < 0.6 * exact_bytes


def test_misspelt_encoding_is_answered_with_those_there_are(chain):
    headers = {**chain.headers, "X-Hapi-Encoding": "uint8;gzip"}
    answer = chain.caller.get(f"/{ACCOUNT}/{CONTAINER}/a.tar", headers)
    assert answer.status_code == 400
    assert answer.json()["code"] == "unknown_encoding"
    assert "'uint8;gzip'" in answer.json()["message"]
    assert "uint8;zstd" in answer.json()["allowed"]
