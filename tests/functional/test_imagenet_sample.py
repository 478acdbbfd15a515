"""Bytes on the wire for photographs of ImageNet's size, backbone frozen."""

import os
from pathlib import Path

import pytest
import torchvision

from hapi_client.data.upload import upload
from hapi_client.progress import SilentReporter
from hapi_client.swift.swift_url import Location
from jobs import connected, transfer_job

LOCATION = Location("imagenet-sample", "")
SAMPLES_PER_SHARD = 60


@pytest.fixture(scope="module")
def tar():
    folder = os.environ.get("HAPI_TEST_DATA")
    if not folder:
        pytest.skip(
            "the bytes of ImageNet photographs: HAPI_TEST_DATA names no "
            "folder with imagenet-sample-*.tar"
        )
    return min(Path(folder).glob("imagenet-sample-*.tar"))


def test_push_down_moves_at_most_a_twentieth_of_the_bytes(cluster, tar):
    model = torchvision.models.resnet18(weights=None)
    moved = {}
    with connected(cluster) as connection:
        upload(connection, LOCATION, [tar], SilentReporter())
        for cut in (0, "freeze"):
            with transfer_job(
                model,
                freeze="avgpool",
                data="swift://imagenet-sample",
                cut=cut,
                connection=connection,
            ) as job:
                received = sum(
                    len(labels) for _, labels in job.pipeline.loader(0)
                )
                assert received == SAMPLES_PER_SHARD
                assert job.stats.fallbacks == 0
                moved[cut] = job.stats.bytes
    assert moved["freeze"] * 20 <= moved[0], moved
