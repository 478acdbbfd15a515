"""Encodings over the whole chain: bounds, order, rows with an error."""

import numpy as np
import pytest

from hapi_protocol.encodings import num_groups
from hapi_protocol.feature_reader import read_features
from hapi_splitter.encodings import decode
from photos import shard, with_corrupt_member

PLACE = "/AUTH_test/encodings"
NUM_SAMPLES = 12
BAD = 3


@pytest.fixture(scope="module")
def ask(owner, small_model):
    """Asks for features in an encoding."""
    owner.put(PLACE)
    data = with_corrupt_member(shard(NUM_SAMPLES), f"s0-{BAD:04d}")
    owner.put(f"{PLACE}/a.tar", data)
    headers = {"X-Hapi-Model": small_model[0], "X-Hapi-Cut": "1"}
    return lambda **more: owner.get(f"{PLACE}/a.tar", {**headers, **more})


def features_of(answer, encoding="float32"):
    """Decoded features, all rows, and the bytes of an answer."""
    assert answer.status_code == 200, answer.text
    batches = list(read_features(answer.content))
    pieces = [
        decode(b.features, encoding, b.scale, b.zero).numpy()
        for b in batches
        if b.features is not None
    ]
    rows = [row for batch in batches for row in batch.rows]
    return np.concatenate(pieces), rows, len(answer.content)


@pytest.fixture(scope="module")
def exact(ask):
    """Answer to a client without support of encodings."""
    return features_of(ask())


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
def test_features_are_within_the_bound_of_their_encoding(ask, exact, encoding):
    answer = ask(**{"X-Hapi-Encoding": encoding})
    features, rows, num_bytes = features_of(answer, encoding)
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
