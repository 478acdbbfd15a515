"""Runs each opponent on a real Swift, in a process of its own."""

import contextlib
import io
import os
import random
import re
import subprocess
import tempfile
import threading
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks.networks import build, split
from benchmarks.opponents import convert, tars
from benchmarks.opponents.preset import Preset
from benchmarks.opponents.serve import Server
from benchmarks.opponents.tar_stream import TarStream
from benchmarks.opponents.training import LEARNING_RATE, MOMENTUM, Place, Task
from benchmarks.testbed.remote import Remote
from swiftclient.client import Connection
from torchvision.io import ImageReadMode, decode_jpeg

from photos import shard
from preloaded import python
from waiting import SECONDS, until

ROOT = Path(__file__).resolve().parents[2]
NUM_SHARDS, SHARD_SAMPLES = 4, 9
TASK = Task("resnet18", "backbone", 4, 72, 64)
CONTAINER = "opponents-photos"
LIBRARIES = {
    "webdataset": "webdataset",
    "s3-tars": "s3torchconnector",
    "s3-images": "s3torchconnector",
    "mosaic": "streaming",
}
PROCESSES = {
    "tar-stream": {"decode": "reader"},
    "webdataset": {"num_workers": 2},
    "s3-tars": {"num_workers": 2, "reader": "sequential"},
    "s3-images": {"num_workers": 2, "reader": "sequential"},
    "mosaic": {"num_workers": 2, "predownload": None},
}
"""Settings with the most threads and processes."""

METER = {"interface": None, "storage_sessions": []}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Tar files."""
    folder = tmp_path_factory.mktemp("photographs")
    paths = []
    for number in range(NUM_SHARDS):
        paths.append(folder / f"photos-{number}.tar")
        paths[-1].write_bytes(shard(SHARD_SAMPLES, size=96, seed=number))
    return paths


@pytest.fixture(scope="module")
def place(cluster, photographs):
    """The tars in Swift, and single photographs."""
    environment = cluster.environment
    found = Place(
        endpoint=cluster.proxy_url,
        auth_url=environment["ST_AUTH"],
        user=environment["ST_USER"],
        key=environment["ST_KEY"],
        container=CONTAINER,
        shards=[path.name for path in photographs],
        num_samples=NUM_SHARDS * SHARD_SAMPLES,
    )
    connection = Connection(found.auth_url, found.user, found.key)
    connection.put_container(CONTAINER)
    for path in photographs:
        connection.put_object(CONTAINER, path.name, path.read_bytes())
    connection.close()
    return found


@pytest.fixture
def start(tmp_path):
    """Starts opponents; checks at the end that nothing is left of them."""
    before = shared_memory()
    # Names of sockets in it must be short.
    temporary = Path(tempfile.mkdtemp(prefix="opponents-"))
    started = []

    def run(name):
        process = subprocess.Popen(
            [python(), "-m", "benchmarks.opponents.serve", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(temporary),
            },
            start_new_session=True,
        )
        started.append(Remote(process, name))
        return started[-1]

    yield run
    for remote in started:
        remote.close()
    until(lambda: not any(session(remote.pid) for remote in started))
    temporary.rmdir()  # fails unless it is empty
    assert shared_memory() <= before


def session(leader):
    """Processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):  # it ended
            if os.getsid(int(path.name)) == leader:
                found.append(int(path.name))
    return found


def shared_memory():
    """Shared memory of torch and of mosaicml-streaming."""
    names = os.listdir("/dev/shm")
    return {n for n in names if re.match(r"torch_|\d{6}", n)}


def converted(place, name, paths):
    """Adds the format that an opponent needs."""
    convert_to = {
        "s3-images": convert.images,
        "mosaic": convert.mds,
        "tar-stream-resized": convert.resized,
    }.get(name)
    if convert_to is None:
        return place
    made = convert.converted(
        convert_to,
        asdict(place),
        paths=[str(path) for path in paths],
        container=f"{CONTAINER}-{name}",
    )
    return replace(place, **made)


@pytest.mark.parametrize("name", PROCESSES)
def test_an_epoch_has_every_sample_once_and_nothing_is_left(
    name, start, place, photographs, tmp_path
):
    if name in LIBRARIES:
        library = LIBRARIES[name]
        reason = f"the opponent {name} needs {library}"
        pytest.importorskip(library, reason=reason)
    remote = start(name)
    ask = partial(remote.ask, seconds=SECONDS)
    here = replace(
        converted(place, name, photographs), cache_folder=str(tmp_path / "c")
    )
    options = PROCESSES[name]
    ask("prepare", task=asdict(TASK), place=asdict(here), options=options)
    # It ends in mid-epoch, and so do its workers.
    progress = ask("follow", epoch=0, until=0.0)
    assert 0 < progress[-1][1] < here.num_samples
    until(lambda: not list(filter(is_worker, session(remote.pid))))
    epochs = ask("epochs", first=1, count=2, **METER)
    assert [each["labels"] for each in epochs] == 2 * [labels_of(photographs)]
    if name == "tar-stream":
        options = {"decode": "loop", "channels_last": True}
        ask("prepare", task=asdict(TASK), place=asdict(here), options=options)
        (epoch,) = ask("epochs", first=0, count=1, **METER)
        shuffled = list(photographs)
        random.Random(0).shuffle(shuffled)
        expected = plain_loop(shuffled)
        assert epoch["loss"] == pytest.approx(expected, rel=1e-5)
    remote.close()
    assert not (tmp_path / "c").exists() or not [*(tmp_path / "c").iterdir()]


def is_worker(pid):
    """True if a process is no permanent one of an opponent."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes()
    return pid != os.getsid(pid) and b"resource_tracker" not in words


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tar-stream-resized", {"decode": "loop"}),
        ("local-features", {"decode": "reader"}),
    ],
)
def test_variants_of_the_tar_stream_have_every_sample_once(
    name, options, place, photographs, tmp_path, monkeypatch
):
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    server = Server(name)
    here = replace(
        converted(place, name, photographs), cache_folder=str(tmp_path)
    )
    server.prepare(asdict(TASK), asdict(here), options)
    before = threading.active_count()
    server.follow(0, 0.0)
    assert threading.active_count() == before
    down = []
    for epoch in server.epochs(0, 2, **METER):
        assert epoch["labels"] == labels_of(photographs)
        down.append(epoch["loss"])
    assert down[1] != down[0]
    server.close()
    assert list(tmp_path.iterdir()) == []


def test_later_epochs_of_local_features_read_no_photographs(
    place, tmp_path, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    server = Server("local-features")
    here = replace(place, cache_folder=str(tmp_path))
    server.prepare(asdict(TASK), asdict(here), {"decode": "reader"})
    server.epochs(0, 1, **METER)

    def refuse(*_):
        raise AssertionError("photographs were read")

    monkeypatch.setattr(TarStream, "batches", refuse)
    server.epochs(1, 2, **METER)
    server.forget()
    with pytest.raises(AssertionError, match="photographs were read"):
        server.epochs(3, 1, **METER)


def labels_of(paths):
    return sorted(
        label
        for path in paths
        for _, _, label in tars.samples(io.BytesIO(path.read_bytes()))
    )


def plain_loop(paths):
    """Loss of the last batch of a loop without a loader."""
    frozen, tail = split(TASK.model, TASK.freeze, build(TASK.model))
    preset = Preset(TASK.resize_size, TASK.crop_size)
    optimizer = torch.optim.SGD(
        tail.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM
    )
    images, labels = [], []
    for path in paths:
        with path.open("rb") as file:
            for _, jpeg, label in tars.samples(file):
                data = torch.frombuffer(jpeg, dtype=torch.uint8)
                images.append(preset(decode_jpeg(data, ImageReadMode.RGB)))
                labels.append(label)
    for batch, known in zip(
        torch.stack(images).split(TASK.batch_size),
        torch.tensor(labels).split(TASK.batch_size),
        strict=True,
    ):
        with torch.no_grad():
            features = frozen(batch)
        loss = torch.nn.functional.cross_entropy(tail(features), known)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss)
