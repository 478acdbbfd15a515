"""Checkpoints of ``torch.distributed.checkpoint`` in a real Swift."""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from as_user import environment_of
from children import run_family
from hapi_training import SwiftStorageReader, SwiftStorageWriter
from preloaded import python
from waiting import SECONDS

SCRIPT = Path(__file__).parent.parent / "support" / "sharded_trainer.py"


@pytest.fixture
def ranks(cluster, request):
    """Saves and loads on some ranks; returns digests of the state."""
    place = f"swift://sharded/{request.node.name}"

    def ranks(num_ranks, *actions, fails=False):
        command = [python(), "-m", "torch.distributed.run"]
        command += ["--standalone", f"--nproc-per-node={num_ranks}"]
        done = run_family(
            [*command, str(SCRIPT), place, *actions],
            SECONDS,
            environment={**environment_of(cluster), "OMP_NUM_THREADS": "1"},
        )
        assert (done.returncode != 0) == fails, done.stderr
        return done.stdout.split()

    return ranks


@pytest.fixture
def names(connection, request):
    def names():
        prefix = f"{request.node.name}/"
        return [
            [
                info.name.removeprefix(prefix)
                for info in connection.list(c, prefix)
            ]
            for c in ("sharded", "sharded_segments")
        ]

    return names


def test_other_ranks_load_what_ranks_have_saved(ranks, names):
    (saved,) = ranks(4, "save")
    objects, segments = names()
    assert len(objects) == 5
    assert len(segments) >= 4
    # A save over it that is killed leaves it whole.
    assert ranks(2, "load", "killed", fails=True) == [saved]
    assert len(names()[1]) > len(segments)
    digests = ranks(2, "load", "thread", "load", "process", "load")
    assert digests == [saved, *[digests[1]] * 2, *[digests[3]] * 2]
    assert len(set(digests)) == 3
    assert ranks(1, "load") == digests[-1:]
    objects, segments = names()
    # Of the last save alone.
    assert len(objects) == 3
    assert {name.partition("/")[0] for name in segments} < set(objects)


def test_older_torch_is_named(monkeypatch):
    home = "hapi_training.checkpoints.sharded"
    older = torch.torch_version.TorchVersion("2.10.0")
    monkeypatch.setattr(torch, "__version__", older)
    monkeypatch.delitem(sys.modules, home)
    with pytest.raises(ImportError, match=r"need torch 2\.11 or later; this"):
        importlib.import_module(home)


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


@pytest.fixture
def state():
    return {"weight": torch.ones(5), "value": 1}


def load(state, connection):
    reader = SwiftStorageReader(
        "swift://sharded/hostile", connection=connection
    )
    dcp.load(state, storage_reader=reader)


def save(state, connection):
    writer = SwiftStorageWriter(
        "swift://sharded/hostile", connection=connection
    )
    dcp.save(state, storage_writer=writer)


def test_hostile_values_are_refused(connection, state, tmp_path):
    path = tmp_path / "ran"
    hostile = {**state, "value": Payload(path)}
    save(hostile, connection)
    with pytest.raises(CheckpointException, match="'value' of the checkpoint"):
        load(state, connection)
    assert not path.exists()
    assert state["value"] == 1
    # Control: torch's own reader runs it.
    dcp.save(hostile, checkpoint_id=tmp_path / "folder")
    dcp.load(state, checkpoint_id=tmp_path / "folder")
    assert path.exists()


def test_hostile_metadata_is_refused(connection, state, tmp_path):
    path = tmp_path / "ran"
    save(state, connection)
    load(state, connection)
    for data, reason in [
        (pickle.dumps(Payload(path)), r"pathlib\S* is refused"),
        (pickle.dumps({}), "it is a dict"),
        (b"", "EOFError"),
    ]:
        connection.put(
            "sharded", "hostile/.metadata", io.BytesIO(data), len(data)
        )
        with pytest.raises(CheckpointException, match=reason):
            load(state, connection)
    assert not path.exists()
    # Control, as above.
    dcp.save(state, checkpoint_id=tmp_path / "folder")
    (tmp_path / "folder" / ".metadata").write_bytes(
        pickle.dumps(Payload(path))
    )
    with pytest.raises(CheckpointException):
        dcp.load(state, checkpoint_id=tmp_path / "folder")
    assert path.exists()


def test_objects_elsewhere_are_refused(connection, state):
    """The metadata cannot name objects of other prefixes."""
    save(state, connection)
    data = connection.get_object("sharded", "hostile/.metadata")
    metadata = pickle.loads(data)
    for info in metadata.storage_data.values():
        info.relative_path = "../other/object"
    data = pickle.dumps(metadata)
    connection.put("sharded", "hostile/.metadata", io.BytesIO(data), len(data))
    with pytest.raises(CheckpointException, match=r"it names '\.\./other"):
        load(state, connection)


def test_no_checkpoint(connection, state):
    reader = SwiftStorageReader("swift://sharded/none", connection=connection)
    with pytest.raises(CheckpointException, match="there is no whole"):
        dcp.load(state, storage_reader=reader)
