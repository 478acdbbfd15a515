"""Text and audio: arrays from a folder to a trained tail, and every tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from array_networks import (
    MELS,
    NUM_IDS,
    TOKENS,
    array_shard,
    audio_network,
    bad_tokens,
    mel_arrays,
    npy,
    shard_with_bad_tokens,
    text_network,
    token_arrays,
)
from equal_training import (
    EPOCHS,
    OPTIONS,
    FrozenBody,
    Samples,
    in_spans,
    job_of,
    local_batches,
    losses_of,
)
from hapi_client.cli.demo.run import largest_difference
from hapi_client.data.upload import upload
from hapi_client.progress import SilentReporter
from hapi_client.swift.swift_url import Location
from hapi_protocol.errors import ClientError
from hapi_protocol.headers import Annotation
from hapi_splitter.inputs.array_transform import ArrayTransform
from jobs import connected, small_job, transfer_job, upload_shards
from local_rows import received_rows
from many_objects import get_many
from slow_link import slow_link

TOLERANCE = 1e-4
SHARDS = (24, 66, 14)
NUM_SAMPLES = sum(SHARDS)


@dataclass
class Stored:
    """A data set in the store, the same here, and a model of it."""

    place: Location
    transform: ArrayTransform
    network: Callable[[], nn.Module]
    spans: list[Samples] = field(default_factory=list)

    def job(self, connection, **options):
        data = options.pop("data", self.place)
        return job_of(
            connection,
            network=self.network(),
            transform=self.transform,
            data=str(data),
            **options,
        )


def stored_text():
    return Stored(Location("arrays", "text"), TOKENS, text_network)


def stored_audio():
    return Stored(Location("arrays", "audio"), MELS, audio_network)


@pytest.fixture(
    scope="module",
    params=[(stored_text, token_arrays), (stored_audio, mel_arrays)],
    ids=["text", "audio"],
)
def stored(request, connection):
    make, make_arrays = request.param
    made = make()
    shards, packed = {}, []
    for number, count in enumerate(SHARDS):
        arrays = make_arrays(count, number)
        shards[f"{number}.tar"] = array_shard(arrays, number)
        samples = [
            (torch.from_numpy(array.astype(made.transform.dtype)), label)
            for array, label in arrays
        ]
        packed.append(samples)
    made.spans += in_spans(packed)
    upload_shards(connection, made.place, shards)
    return made


@pytest.fixture(scope="module")
def local(stored):
    """The losses of plain torch."""
    model = FrozenBody(stored.network())
    losses = losses_of(model, partial(local_batches, stored.spans))
    assert losses[-1] < 0.9 * losses[0]
    return losses


@pytest.mark.parametrize("cut", ["stream", 2, "freeze"])
def test_losses_are_those_of_plain_torch(connection, stored, local, cut):
    with stored.job(connection, cut=cut) as job:
        losses = losses_of(job.tail, job.pipeline.loader)
        assert job.stats.fallbacks == 0
        number = {"stream": 0, "freeze": job.num_cuts}.get(cut, cut)
        assert job.stats.samples_by_cut == {number: EPOCHS * NUM_SAMPLES}
    assert len(losses) == len(local)
    assert largest_difference(local, losses) <= TOLERANCE


@pytest.fixture(scope="module")
def broken(connection):
    """Bad arrays between good ones."""
    place = Location("arrays", "broken")
    shards = {"a.tar": shard_with_bad_tokens()}
    return upload_shards(connection, place, shards)


def failures_of(connection, job):
    """Sample to message, of all that a job cannot read."""
    failures = {}
    by_number = job.dataset(shuffle=False).samples()
    for number in range(len(by_number)):
        try:
            by_number[number]
        except ClientError as error:
            failures[number] = error.message.partition("; remove its number")[
                0
            ]
    by_number.close()
    return failures


def test_bad_arrays_say_the_same_on_both_tiers_and_harm_no_other(
    connection, broken
):
    text = stored_text()
    bad = [said for _, said in bad_tokens().values()]
    messages = {}
    features = {}
    for cut in ("stream", "freeze"):
        options = {"data": str(broken), "cut": cut}
        with text.job(connection, **options) as job:
            messages[cut] = failures_of(connection, job)
        with text.job(connection, on_error="skip", **options) as job:
            features[cut] = torch.cat([x for x, _ in job.pipeline.loader()])
            assert job.stats.skipped == len(bad)
            assert job.stats.fallbacks == 0
    assert messages["stream"] == messages["freeze"]
    numbers = range(1, 2 * len(bad), 2)
    assert list(messages["stream"]) == list(numbers)
    for number, said in zip(numbers, bad, strict=True):
        message = messages["stream"][number]
        assert said in message
        assert f"sample 'a0-{number:04d}' of shard broken/a.tar" in message
    network = text_network().eval()
    ids = torch.from_numpy(np.stack([a for a, _ in token_arrays(20)]))
    with torch.inference_mode():
        expected = network.body(ids.long()).mean(1)
    for computed in features.values():
        torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-5)


def test_array_of_its_own_becomes_features(connection, broken, owner):
    text = stored_text()
    with text.job(connection, data=str(broken), cut="freeze") as job:
        wanted = Annotation(job.pipeline._factory.sources.model, job.num_cuts)
    owner.put("/AUTH_test/arrays/one.npy", npy(token_arrays(1)[0][0]))
    answer = owner.get("/AUTH_test/arrays/one.npy", wanted.to_headers())
    assert answer.status_code == 200, answer.text
    names = ["one.npy", "none.npy", "one.npy"]
    rows = list(get_many(connection, "arrays", names, wanted))
    assert [row.code for row in rows] == [None, "not_found", None]
    assert torch.equal(rows[0].features, rows[2].features)
    features = received_rows(answer.content).features
    torch.testing.assert_close(
        torch.from_numpy(features[0]), rows[0].features, rtol=1e-4, atol=1e-5
    )


class MixedTokens(nn.Module):
    """No two tokens stay the same, as behind attention."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(128, 128)

    def forward(self, x):
        return x + self.mixed(x.transpose(1, 2)).transpose(1, 2)


class Deep(nn.Module):
    """Features for each of 128 ids; the tail uses all of them."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.body = nn.Sequential(
                nn.Embedding(NUM_IDS, 64), MixedTokens(), nn.Linear(64, 64)
            )
            self.head = nn.Sequential(
                nn.Linear(64, 8), nn.Flatten(), nn.Linear(8 * 128, 4)
            )

    def forward(self, ids):
        result: torch.Tensor = self.head(self.body(ids))
        return result


@pytest.fixture(scope="module")
def sentences(connection, tmp_path_factory):
    """Samples of 128 two-byte ids, uploaded as a folder of class folders."""
    place = Location("arrays", "sentences")
    folder = tmp_path_factory.mktemp("sentences")
    random = np.random.default_rng(0)
    for label in range(4):
        (folder / f"class-{label}").mkdir()
        for number in range(30):
            ids = random.integers(0, NUM_IDS, 128).astype(np.int16)
            path = folder / f"class-{label}" / f"{number}.npy"
            path.write_bytes(npy(ids))
    report = upload(connection, place, [folder], SilentReporter())
    assert report.samples == 120
    return place


SENTENCES = ArrayTransform((128,), "int64")
LINK_BYTES_PER_SECOND = 60_000


def test_job_streams_where_features_are_larger_than_what_is_stored(
    cluster, sentences
):
    with (
        slow_link(cluster.auth_url, LINK_BYTES_PER_SECOND) as url,
        connected(cluster, auth_url=url) as slow,
        transfer_job(
            Deep(),
            freeze="body",
            data=str(sentences),
            transform=SENTENCES,
            connection=slow,
            epochs=1e6,
            read=OPTIONS,
            memory_bytes=0,
        ) as job,
    ):
        epoch = 0
        while not job.pipeline.plan.planner.wait(0):
            assert sum(len(y) for _, y in job.pipeline.loader(epoch)) == 120
            epoch += 1
            assert epoch < 1000
        assert job.plan is None
        assert job.no_plan_reason == (
            "no cut would be faster, not even on an infinitely fast worker"
        )
        assert set(job.stats.samples_by_cut) == {0}


def test_arrays_are_not_taken_for_images(connection, sentences):
    with (
        small_job(
            sentences, connection=connection, cut="stream", read=OPTIONS
        ) as job,
        pytest.raises(ClientError, match="the job an ArrayTransform"),
    ):
        next(iter(job.pipeline.loader()))


@pytest.mark.parametrize("command", ["ls", "doctor", "info"])
def test_commands_know_data_sets_of_arrays(hapi, sentences, command, capsys):
    assert hapi(command, sentences) == 0
    said = {"ls": "shard-000000.tar", "info": "npy"}
    assert said.get(command, "") in capsys.readouterr().out
