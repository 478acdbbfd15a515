"""Each encoding over the worker's socket, and the memory it is given."""

import numpy as np
import pytest
import torch

from hapi_protocol.encodings import DTYPES, ENCODINGS, Encoding
from hapi_splitter.encodings import decode, encode
from hapi_splitter.freezing.split_model import split
from hapi_splitter.package.writer import package_pieces
from hapi_splitter.profiling.memory_model import memory_requirement
from hapi_worker.execution.forward import encode_rows, run_prefix
from networks import small_network, small_transform
from photos import shard, with_corrupt_member
from worker_under_test import (
    job_for,
    running_worker,
    small_package,
    small_split,
)

NUM_SAMPLES = 20
BAD = 7
CUT = 1
ROUNDING = {
    "float32": 1e-5,
    "float16": 2**-10,
    "bfloat16": 2**-7,
    "uint8": 1e-5,
}
"""Between neighbouring values of each type, relative."""


@pytest.fixture(scope="module")
def tar():
    return with_corrupt_member(shard(NUM_SAMPLES, size=90), f"s0-{BAD:04d}")


def decoded(reader, encoding):
    return torch.cat(
        [
            decode(batch.features, encoding, batch.scale, batch.zero)
            for batch in reader.batches
            if batch.features is not None
        ]
    )


@pytest.fixture(scope="module")
def computed(worker, tar):
    """The features in float32, as the worker computes them."""
    package = small_package()
    return decoded(worker.run(job_for(tar, package), package, tar), "float32")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_features_travel_in_every_encoding(worker, tar, computed, encoding):
    package = small_package()
    job = job_for(tar, package, encoding=encoding)
    reader = worker.run(job, package, tar)
    batches = reader.batches
    rows = [row for batch in batches for row in batch.rows]
    assert [row.index for row in rows] == list(range(NUM_SAMPLES))
    assert [row.index for row in rows if row.error] == [BAD]
    wire = Encoding.parse(encoding).wire_dtype
    assert {str(batch.features.dtype) for batch in batches} == {wire}
    # Two forward passes in batches of other sizes may differ in the last
    # bits, so that some values are rounded the other way.
    sent = encode(computed, encoding)
    wanted = decode(sent.array, encoding, sent.scale, sent.zero)
    step = 0.0 if sent.scale is None else float(sent.scale.max())
    torch.testing.assert_close(
        decoded(reader, encoding),
        wanted,
        rtol=ROUNDING[Encoding.parse(encoding).dtype],
        atol=step + 1e-5,
    )
    assert (reader.summary.errors, reader.summary.saturated) == (1, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_halved_batch_is_encoded_as_a_whole_one(dtype):
    sizes = []

    def prefix(images):
        sizes.append(len(images))
        if len(images) > 2:
            raise torch.OutOfMemoryError("no room")
        return images * 1e38

    images = torch.randn(7, 2, 40)
    images[3, 1, 5] = 40.0
    forwarded = run_prefix(prefix, images, device=torch.device("cpu"))
    found = encode_rows(forwarded.features, dtype)
    assert max(sizes) == 7
    wanted = encode(images * 1e38, dtype)
    np.testing.assert_array_equal(found.array, wanted.array)
    for mine, yours in (
        (found.scale, wanted.scale),
        (found.zero, wanted.zero),
    ):
        assert (mine is None) == (yours is None)
        if mine is not None and yours is not None:
            np.testing.assert_array_equal(mine, yours)
    assert found.saturated == wanted.saturated
    assert (found.saturated > 0) == (dtype != "float32")


def test_clipped_values_are_counted(tmp_path, tar):
    """Weights beyond float16's range make features that saturate."""
    network = small_network()
    with torch.no_grad():
        network.body[0].weight.mul_(1e6)
    frozen = split(network, "body", transform=small_transform()).frozen
    package = b"".join(package_pieces(frozen))
    with running_worker(tmp_path) as worker:
        job = job_for(tar, package, encoding="float16;lz4")
        reader = worker.run(job, package, tar)
        counted = worker.worker.metrics.value("hapi_worker_saturated_total")
    features = decoded(reader, "float16;lz4")
    largest = int((features.abs() == 65504).sum())
    assert 0 < reader.summary.saturated <= largest
    assert counted == reader.summary.saturated


@pytest.mark.parametrize("encoding", ["float32", "uint8;zstd"])
def test_batches_leave_room_for_the_encoding(tmp_path, encoding):
    package = small_package()
    frozen = small_split().frozen.to("cpu", fast=True)
    needs = memory_requirement(frozen, CUT, encoding)
    limit = needs.peak_bytes(5)
    with running_worker(tmp_path, memory_limit=limit) as worker:
        job = job_for(b"", package, encoding=encoding)
        worker.grant(job, package)
        models = worker.worker.models
        lease = models.acquire(job.model, CUT, encoding)
        assert lease.batch_limit(64) == needs.batch_for(limit, 64) == 5
        lease.release()
