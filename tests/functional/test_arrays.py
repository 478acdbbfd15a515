"""Text and audio: arrays from a folder to a trained tail, and every tier."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from array_networks import (
    MELS,
    NUM_IDS,
    TOKENS,
    array_shard,
    audio_network,
    mel_arrays,
    npy,
    text_network,
    token_arrays,
)
from equal_training import (
    EPOCHS,
    OPTIONS,
    RATE,
    SPAN,
    FrozenBody,
    Samples,
    job_of,
    local_batches,
    steps_of,
)
from hapi_client import Connection, Credentials
from hapi_client.cli.demo.run import largest_difference
from hapi_client.cli.main import app
from hapi_client.data.index import load_index, update_index
from hapi_client.data.upload import upload
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.plan_report.plan_study import PlanRequest, advise
from hapi_client.progress import SilentReporter
from hapi_client.swift.swift_url import Location
from hapi_protocol.errors import ClientError
from hapi_protocol.feature_reader import read_features
from hapi_protocol.headers import Annotation
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.planner.plan import solve
from jobs import small_job, transfer_job, upload_shards
from slow_link import slow_link

SECONDS = 110
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
def stored(request, connection, tmp_path_factory):
    make, make_arrays = request.param
    found = make()
    shards = {}
    for number, count in enumerate(SHARDS):
        arrays = make_arrays(count, number)
        shards[f"{number}.tar"] = array_shard(arrays, number)
        samples = [
            (torch.from_numpy(array.astype(found.transform.dtype)), label)
            for array, label in arrays
        ]
        found.spans += [
            samples[first : first + SPAN]
            for first in range(0, len(samples), SPAN)
        ]
    folder = tmp_path_factory.mktemp("shards")
    upload_shards(connection, found.place, folder, shards)
    return found


def optimizer_of(tail):
    trained = [p for p in tail.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=RATE, momentum=0.9)


@pytest.fixture(scope="module")
def local(stored):
    """The losses of plain torch."""
    model = FrozenBody(stored.network())
    optimizer = optimizer_of(model)
    losses = [
        loss
        for epoch in range(EPOCHS)
        for loss, _ in steps_of(
            model, optimizer, local_batches(stored.spans, epoch)
        )
    ]
    assert losses[-1] < 0.9 * losses[0]
    return losses


@pytest.mark.parametrize("cut", ["stream", 2, "freeze"])
def test_losses_are_those_of_plain_torch(connection, stored, local, cut):
    with stored.job(connection, cut=cut) as job:
        optimizer = optimizer_of(job.tail)
        losses = [
            loss
            for epoch in range(EPOCHS)
            for loss, _ in steps_of(job.tail, optimizer, job.loader(epoch))
        ]
        assert job.stats.fallbacks == 0
        number = {"stream": 0, "freeze": job.num_cuts}.get(cut, cut)
        assert job.stats.samples_by_cut == {number: EPOCHS * NUM_SAMPLES}
    assert len(losses) == len(local)
    assert largest_difference(local, losses) <= TOLERANCE


def test_index_that_the_store_writes_is_that_of_the_upload(connection, stored):
    place = stored.place
    uploaded = load_index(connection, place)
    connection.delete(place.container, place.index_name)
    assert update_index(connection, place).samples == NUM_SAMPLES
    assert load_index(connection, place) == uploaded


def test_data_sets_of_torch_have_the_features_of_arrays(connection, stored):
    network = stored.network().eval()
    samples = [sample for span in stored.spans for sample in span]
    with stored.job(connection, cut="freeze") as job:
        with torch.inference_mode():
            tail = job.tail.eval()
            by_number = job.samples()
            for number in (0, 95, NUM_SAMPLES - 1):
                features, label = by_number[number]
                array, expected = samples[number]
                assert label == expected
                torch.testing.assert_close(
                    tail(features[None]),
                    network(array[None]),
                    rtol=TOLERANCE,
                    atol=1e-5,
                )
            by_number.close()
        data = job.dataset()
        labels = torch.cat([y for _, y in DataLoader(data, batch_size=None)])
        expected = torch.cat([y for _, y in job.loader(0)])
    assert torch.equal(labels, expected)


class Payload:
    def __reduce__(self):
        return (exec, ("raise SystemExit",))


def bad_tokens():
    fine = token_arrays(1)[0][0]
    outside = fine.copy()
    outside[3] = NUM_IDS
    return {
        "truncated": (
            npy(fine)[:-1],
            "truncated .npy: 31 bytes of values, expected 32 for (16,) of "
            "int16",
        ),
        "lying": (
            npy(fine).replace(b"(16,)", b"(17,)"),
            "an array of shape (17,); the model takes (16,)",
        ),
        "pickle": (pickle.dumps(Payload()), "not a NumPy array (.npy)"),
        "objects": (
            npy(fine).replace(b"'<i2'", b"'|O' "),
            "an array of object; the model takes int64",
        ),
        "huge header": (
            b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
            "a .npy header of 4294967295 bytes; at most 1024",
        ),
        "dtype": (
            npy(fine.astype(np.float64)),
            "an array of float64; the model takes int64",
        ),
        "shape": (npy(fine[:3]), "an array of shape (3,); the model takes"),
        "ids": (
            npy(outside),
            "the id 50 at [3]; the model accepts ids from 0 to 49 there",
        ),
    }


@pytest.fixture(scope="module")
def broken(connection, tmp_path_factory):
    """Bad arrays between good ones."""
    place = Location("arrays", "broken")
    fine = token_arrays(20)
    mixed = []
    bad = [data for data, _ in bad_tokens().values()]
    for number, sample in enumerate(fine):
        mixed.append(sample)
        if number < len(bad):
            mixed.append((bad[number], 0))
    folder = tmp_path_factory.mktemp("broken")
    upload_shards(connection, place, folder, {"a.tar": array_shard(mixed)})
    return place


def failures_of(connection, job):
    """Sample to message, of all that a job cannot read."""
    found = {}
    by_number = job.samples()
    for number in range(len(by_number)):
        try:
            by_number[number]
        except ClientError as error:
            found[number] = error.message.partition("; remove its number")[0]
    by_number.close()
    return found


def test_bad_arrays_say_the_same_on_both_tiers_and_harm_no_other(
    connection, broken
):
    text = stored_text()
    bad = [said for _, said in bad_tokens().values()]
    found = {}
    features = {}
    for cut in ("stream", "freeze"):
        options = {"data": str(broken), "cut": cut, "on_error": "skip"}
        with text.job(connection, **options) as job:
            found[cut] = failures_of(connection, job)
            features[cut] = torch.cat([x for x, _ in job.loader()])
            assert job.stats.skipped == len(bad)
            assert job.stats.fallbacks == 0
    assert found["stream"] == found["freeze"]
    numbers = range(1, 2 * len(bad), 2)
    assert list(found["stream"]) == list(numbers)
    for number, said in zip(numbers, bad, strict=True):
        message = found["stream"][number]
        assert said in message
        assert f"sample 'a0-{number:04d}' of shard broken/a.tar" in message
    network = text_network().eval()
    ids = torch.from_numpy(np.stack([a for a, _ in token_arrays(20)]))
    with torch.inference_mode():
        expected = network.body(ids.long()).mean(1)
    for each in features.values():
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-5)


def rows_of(answer):
    assert answer.status_code == 200, answer.text
    return {
        row.key: row.error
        for batch in read_features(io.BytesIO(answer.content))
        for row in batch.rows
    }


def test_worker_itself_says_what_is_wrong(connection, cluster, broken, owner):
    """And not only the client, which looks again."""
    text = stored_text()
    with text.job(connection, data=str(broken), cut="freeze") as job:
        model = job._factory.sources.model
        headers = {
            "X-Hapi-Model": model.quoted(),
            "X-Hapi-Cut": str(job.num_cuts),
        }
    answer = owner.get("/AUTH_test/arrays/broken/a.tar", headers)
    errors = [error for error in rows_of(answer).values() if error]
    for error, (_, said) in zip(errors, bad_tokens().values(), strict=True):
        assert said in error
    array = token_arrays(1)[0][0]
    owner.put("/AUTH_test/arrays/one.npy", npy(array))
    answer = owner.get("/AUTH_test/arrays/one.npy", headers)
    assert rows_of(answer) == {"one": None}
    wanted = Annotation(model=model, cut=int(headers["X-Hapi-Cut"]))
    names = ["one.npy", "none.npy", "one.npy"]
    found = list(connection.get_many("arrays", names, wanted))
    assert [each.code for each in found] == [None, "not_found", None]
    assert torch.equal(found[0].features, found[2].features)


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
        Connection(Credentials.v1(url, cluster.user, cluster.key)) as slow,
        transfer_job(
            Deep(),
            freeze="body",
            data=str(sentences),
            transform=SENTENCES,
            connection=slow,
            epochs=1e6,
            read=OPTIONS,
        ) as job,
    ):
        epoch = 0
        while not job._planner.wait(0):
            assert sum(len(y) for _, y in job.loader(epoch)) == 120
            epoch += 1
            assert epoch < 1000
        assert job.plan is None
        assert job.no_plan_reason == (
            "no cut would be faster, not even on an infinitely fast worker"
        )
        assert set(job.stats.samples_by_cut) == {0}


def test_plan_says_why_ids_are_streamed(connection, sentences):
    region = FrozenRegion(Deep(), "body", SENTENCES, torch.device("cpu"))
    question = PlanRequest(
        min_precision="lossless",
        epochs=1e6,
        batch_size=32,
        link=12_500,
        num_samples=None,
        upload=True,
        name="deep",
    )
    advice = advise(region, question, SilentReporter(), connection, sentences)
    plan = solve(advice.report.problem)
    assert not plan.pushes, plan.reasons
    assert str(plan).startswith("stream: ")
    assert str(plan).endswith("samples/s, limited by link")
    assert plan.reasons[:2] == (
        "Streaming: the client reads all samples as they are stored and "
        "computes all layers.",
        "The link is busy all the time: it carries the stored samples.",
    )
    assert "No cut is faster, alone or mixed with streaming" in plan.reasons[3]
    assert "(it has 100 kbit/s)" in plan.reasons[-1]
    # Ids of two bytes in a tar; 64 numbers of four bytes for each.
    assert advice.facts.samples.raw_bytes == 4 * 512
    assert {cut.float32_bytes for cut in advice.facts.cuts} == {128 * 64 * 4}


def test_arrays_are_not_taken_for_images(connection, sentences):
    with (
        small_job(
            sentences, connection=connection, cut="stream", read=OPTIONS
        ) as job,
        pytest.raises(ClientError, match="the job an ArrayTransform"),
    ):
        next(iter(job.loader()))


@pytest.mark.parametrize("command", ["ls", "doctor", "info"])
def test_commands_know_data_sets_of_arrays(cluster, sentences, command):
    login = ["--auth", cluster.auth_url, "--user", cluster.user]
    place = [command, str(sentences)]
    result = CliRunner().invoke(app, [*login, "--key", cluster.key, *place])
    assert result.exit_code == 0, result.output
    said = {"ls": "shard-000000.tar", "info": "npy"}
    assert said.get(command, "") in result.output
