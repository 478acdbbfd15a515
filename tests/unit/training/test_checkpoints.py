"""Checkpoints are whole, equal to torch's files, and of one step."""

from __future__ import annotations

import errno
import gc
import io
import os
import re
import tempfile
import threading
from collections import deque
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from forked_ranks import run_ranks
from full_disk import no_file_beyond
from hapi_protocol.errors import ClientError
from hapi_training import VirtualNodes
from hapi_training.checkpoints import direct_write, folder
from hapi_training.checkpoints.direct_write import reserve, write_range
from hapi_training.checkpoints.manager import CheckpointManager
from hapi_training.checkpoints.torch_file import FileBytes, layout_of
from node_training import batches, digest, network


def content():
    """Odd, tied, empty, strided and shared tensors of several types."""
    torch.manual_seed(0)
    weight = torch.randn(999, 333)
    return {
        "weight": weight,
        "tied": weight,
        "transposed": weight.t(),
        "rows": weight[3:5],
        "empty": torch.empty(0, 3),
        "half": torch.randn(7).bfloat16(),
        "parameter": nn.Parameter(torch.randn(3)),
        "norm": nn.BatchNorm1d(5).state_dict(),
        "nested": [1, 2.5, "text", None, (torch.arange(4097),), {3: True}],
    }


def torch_file(values):
    """The bytes of torch.save without checksums."""
    torch.serialization.set_crc32_options(False)
    try:
        file = io.BytesIO()
        torch.save(values, file)
    finally:
        torch.serialization.set_crc32_options(True)
    return file.getvalue()


def written(values, path, num_writers=1, shift=0):
    layout, storages = layout_of(values)
    data = FileBytes(layout, storages)
    reserve(path, data.size)
    length = direct_write.aligned(-(-data.size // num_writers))
    for start in range(0, data.size, length):
        write_range(
            path,
            start,
            min(data.size, start + length),
            lambda target, offset, s=start: data.copy_to(
                target, offset + (shift if s else 0)
            ),
        )
    os.truncate(path, data.size)
    return path.read_bytes()


@pytest.mark.parametrize("num_writers", [1, 2, 4])
def test_file_is_that_of_torch(tmp_path, monkeypatch, num_writers):
    monkeypatch.setattr(direct_write, "BUFFER_BYTES", 1 << 16)
    values, path = content(), tmp_path / "file.pt"
    assert written(values, path, num_writers) == torch_file(values)
    for mmap in (False, True):
        again = torch.load(path, weights_only=True, mmap=mmap)
        assert digest(again) == digest(values)
        assert again["tied"] is again["weight"]
        assert again["transposed"].data_ptr() == again["weight"].data_ptr()


def test_control_a_shifted_range_is_another_file(tmp_path):
    values, path = content(), tmp_path / "file.pt"
    assert written(values, path, 2, shift=4096) != torch_file(values)


def test_torch_without_holes_gives_the_same_file(tmp_path, monkeypatch):
    values, path = content(), tmp_path / "file.pt"
    expected = written(values, path)
    monkeypatch.delattr(torch.serialization, "skip_data")
    layout, storages = layout_of(values)
    assert (layout.holes, storages) == ((), [])
    assert written(values, path) == expected


@pytest.mark.parametrize("refuses", ["open", "pwrite"])
def test_file_system_without_direct_writes(tmp_path, monkeypatch, refuses):
    real = getattr(os, refuses)
    flags = {"open": 1, "pwrite": 0}

    def refuse(first, second, *rest):
        is_direct = (
            second & os.O_DIRECT
            if refuses == "open"
            else fcntl_flags(first) & os.O_DIRECT
        )
        if is_direct:
            flags["refused"] = True
            raise OSError(errno.EINVAL, "no direct I/O")
        return real(first, second, *rest)

    monkeypatch.setattr(os, refuses, refuse)
    values = content()
    assert written(values, tmp_path / "file.pt") == torch_file(values)
    assert flags["refused"]


def fcntl_flags(file):
    import fcntl

    return fcntl.fcntl(file, fcntl.F_GETFL)


def train(folder, stop=None, *, more=None, **options):
    """Trains eight steps, or from where it was; returns a digest."""
    module = network()
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    nodes = VirtualNodes(module, 8)
    state = {
        "module": module,
        "optimizer": optimizer,
        "nodes": nodes,
        "losses": [],
        **(more or {}),
    }
    with CheckpointManager(state, local=folder, **options) as checkpoints:
        checkpoints.restore()
        for step in nodes.steps(batches(8)[nodes.step :], state):
            for images, labels in step:
                step.backward(cross_entropy(module(images), labels))
            # Random numbers of the loop belong to a step, too.
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad += 1e-4 * torch.randn_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
            state["losses"].append(step.loss)
            checkpoints.save()
            if stop == nodes.step:
                break
    return digest(module.state_dict(), optimizer.state_dict(), state["losses"])


def names(folder):
    return sorted(p.name for p in folder.iterdir() if p.suffix == ".pt")


STEP_4, STEP_7, STEP_8 = (f"step-{n:012}.pt" for n in (4, 7, 8))


@pytest.mark.parametrize("options", [{}, {"verify": True}, {"keep": 1}])
def test_run_goes_on_from_its_checkpoint(tmp_path, options):
    expected = train(tmp_path / "whole", **options)
    train(tmp_path / "run", stop=4, **options)
    assert STEP_4 in names(tmp_path / "run")
    assert train(tmp_path / "run", **options) == expected
    kept = [STEP_8] if "keep" in options else [STEP_7, STEP_8]
    assert names(tmp_path / "run") == kept
    assert sorted(os.listdir(tmp_path / "run")) == ["run.json", *kept]


def test_every_second_step(tmp_path):
    train(tmp_path, stop=5, every=2)
    assert names(tmp_path) == [f"step-{n:012}.pt" for n in (2, 4)]
    assert train(tmp_path, every=2) == train(tmp_path / "whole")


def in_small_ranges(rank, path, stop=None, **options):
    folder.CORES_PER_WRITER = 0.1
    folder.MIN_RANGE_BYTES = 4096
    return train(path, stop, **options)


def test_ranks_write_one_file_that_any_number_restores(tmp_path):
    expected = train(tmp_path / "whole")
    run = partial(in_small_ranges, path=tmp_path / "run", verify=True)
    for num_ranks, stop in ((4, 2), (1, 4), (2, 6), (3, None)):
        results = run_ranks(num_ranks, partial(run, stop=stop))
        assert len(set(results)) == 1, results
    assert results[0] == expected
    assert names(tmp_path / "run") == [STEP_7, STEP_8]


def own_folder(rank, path, stop=None):
    return in_small_ranges(rank, path / str(rank), stop)


def test_ranks_with_folders_of_their_own_write_a_file_each(tmp_path):
    run_ranks(2, partial(own_folder, path=tmp_path, stop=4))
    files = [(tmp_path / rank / STEP_4).read_bytes() for rank in "01"]
    assert files[0] == files[1]
    # The newest of any rank counts.
    (tmp_path / "0" / STEP_4).unlink()
    results = run_ranks(2, partial(own_folder, path=tmp_path))
    assert results == [train(tmp_path / "whole")] * 2


def test_damaged_checkpoints_are_passed_over(tmp_path, caplog):
    train(tmp_path, stop=4, keep=3)
    (tmp_path / STEP_4).write_bytes(b"no checkpoint")
    assert train(tmp_path) == train(tmp_path / "whole")
    assert f"{STEP_4}: UnpicklingError: Weights only load" in caplog.text
    assert "weights_only" not in caplog.text
    for name in (STEP_7, STEP_8):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ClientError, match="no checkpoint can be loaded"):
        train(tmp_path)


def test_step_that_exists_is_replaced(tmp_path):
    """And later ones, of what the run was before, are no longer restored."""
    expected = train(tmp_path, keep=9)
    for number in (6, 7):
        (tmp_path / f"step-{number:012}.pt").unlink()
    (tmp_path / STEP_8).write_bytes(b"damaged")
    train(tmp_path, stop=6, keep=9)
    assert names(tmp_path)[-1] == f"step-{6:012}.pt"
    assert train(tmp_path) == expected


def test_one_file_is_replaced_through_its_link(tmp_path):
    path, link = tmp_path / "run.pt", tmp_path / "link.pt"
    link.symlink_to(path)
    left = tmp_path / f"run.pt.{'0' * 32}.part"
    left.write_bytes(b"of a run that was killed")
    train(link, stop=4)
    expected = train(tmp_path / "whole")
    path.unlink()
    with CheckpointManager({}, local=path) as first:
        first.save()
        second = CheckpointManager({}, local=link)
        with pytest.raises(ClientError, match="another run uses"):
            second.restore()
    path.unlink()
    train(link, stop=4)
    assert train(path) == expected
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link.pt", "run.pt", "whole"]


def test_file_that_is_no_checkpoint_is_not_overwritten(tmp_path):
    """Such as the weights of a finished run, or a checkpoint of another."""
    path = tmp_path / "model.pt"
    torch.save(network().state_dict(), path)
    before = path.read_bytes()
    with pytest.raises(ClientError, match="exists, and is no checkpoint"):
        CheckpointManager({"module": network()}, local=path).save()
    assert path.read_bytes() == before
    train(tmp_path / "run.pt", stop=1)
    with pytest.raises(ClientError, match="of another run; call restore"):
        CheckpointManager(
            {"module": network()}, local=tmp_path / "run.pt"
        ).save()


class SlowWrites:
    """Writes begin when they may."""

    def __init__(self, monkeypatch):
        self.may_begin = threading.Event()
        monkeypatch.setattr(folder, "write_range", self.write)

    def write(self, *arguments):
        assert self.may_begin.wait(300)
        write_range(*arguments)


@pytest.mark.parametrize("waits", [True, False])
def test_optimizer_waits_until_its_parameters_are_written(
    tmp_path, monkeypatch, waits
):
    slow = SlowWrites(monkeypatch)
    module = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    state = {"module": module, "optimizer": optimizer}
    manager = CheckpointManager(state, local=tmp_path, verify=True)
    module(torch.ones(1, 300)).sum().backward()
    before = module.weight.detach().clone()
    with manager:
        manager.save()
        if waits:
            threading.Timer(0.5, slow.may_begin.set).start()
        else:
            # A control: the step comes in the middle of the write.
            manager._writes._written = None
        optimizer.step()
        assert slow.may_begin.is_set() is waits
        slow.may_begin.set()
    assert manager.stats.seconds_blocked > 0.2 * waits
    again = CheckpointManager(state, local=tmp_path)
    if waits:
        assert again.restore()
        assert torch.equal(module.weight, before)
    else:
        with pytest.raises(ClientError, match="not those of their digests"):
            again.restore()


def test_full_disk_is_named_and_the_last_checkpoint_stays(tmp_path):
    module = nn.Linear(100, 100)
    state = {"module": module}
    with CheckpointManager(state, local=tmp_path, keep=1) as checkpoints:
        checkpoints.save()
        checkpoints.wait()
        with no_file_beyond(10_000):
            checkpoints.save()
            with pytest.raises(ClientError, match="cannot be written"):
                checkpoints.wait()
        assert sorted(os.listdir(tmp_path))[-1] == f"step-{1:012}.pt"
        # Training goes on.
        checkpoints.save()
    assert names(tmp_path) == [f"step-{3:012}.pt"]
    assert len(os.listdir(tmp_path)) == 2


def other_run(path):
    train(path)
    CheckpointManager({"module": network()}, local=path).save()


def two_at_once(path):
    state = {"module": network()}
    with CheckpointManager(state, local=path) as first:
        first.save()
        first.wait()
        second = CheckpointManager(state, local=path)
        second.restore()
        second.save()


def other_names(path):
    train(path, stop=1)
    train(path, more={"scheduler": 3})


def other_model(path):
    train(path, stop=1)
    state = dict.fromkeys(("optimizer", "nodes", "losses"), 0)
    manager = CheckpointManager(
        {"module": nn.Linear(2, 2), **state}, local=path
    )
    manager.restore()


def refused_value(path):
    train(path, more={"extra": {"a": [0, object()]}})


def other_version(path):
    (path / "run.json").write_text('{"version": 9}')
    train(path)


def no_folder(path):
    (path / "file").touch()
    train(path / "file" / "run")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (other_run, "checkpoints of another run; call restore"),
        (two_at_once, "another run uses"),
        (other_names, r"the state has .*'scheduler'.* the checkpoint has"),
        (other_model, "belongs to another model or release"),
        (refused_value, r"\['extra'\]\['a'\]\[1\] of type object"),
        (other_version, r"its version is 9\); .* give another folder"),
        (no_folder, "Not a directory"),
        (partial(train, every=0), "every is 0"),
        (partial(train, keep=0), "keep is 0"),
    ],
)
def test_misuse_is_named(tmp_path, use, message):
    with pytest.raises(ClientError, match=message):
        use(tmp_path)


def test_nothing_is_left_of_many_checkpoints(tmp_path):
    module = nn.Linear(10, 10)
    files = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    for _ in range(200):
        state = {"module": module}
        with CheckpointManager(state, local=tmp_path) as checkpoints:
            checkpoints.restore()
            checkpoints.save()
    assert len(os.listdir("/proc/self/fd")) == files
    assert threading.active_count() == threads
    assert len(os.listdir(tmp_path)) == 3


def rank_that_fails(rank, path):
    """Rank 1 cannot write."""
    folder.CORES_PER_WRITER = 0.1
    folder.MIN_RANGE_BYTES = 4096
    if rank:
        folder.write_range = broken
    try:
        train(path, stop=3)
    except ClientError as error:
        return error.message
    return "no error"


def broken(*arguments):
    raise OSError(errno.EIO, "a broken disk")


def test_rank_that_does_not_write_is_named_on_all(tmp_path):
    messages = run_ranks(2, partial(rank_that_fails, path=tmp_path))
    for message in messages:
        assert "rank 1:" in message
        assert "a broken disk; make room" in message
    assert not names(tmp_path)


class Unwilling:
    """Has no state on the second rank."""

    def state_dict(self):
        raise OSError("no state here")

    load_state_dict = state_dict


def rank_that_differs(rank, path, case):
    """Returns what this rank has restored, or its error."""
    torch.manual_seed(rank)
    folder.CORES_PER_WRITER = 0.1
    folder.MIN_RANGE_BYTES = 4096
    module = nn.Linear(100, 100)
    state = {
        "module": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
        "queue": torch.full((50_000,), float(rank)),
    }
    if case != "two models":
        with torch.no_grad():
            module.weight.fill_(1.0)
            module.bias.zero_()
    if case == "no state" and rank:
        state["object"] = Unwilling()
    place = path / str(rank) if case == "full disk" else path
    if case == "full disk" and rank:
        folder.reserve = broken
    before = torch.get_rng_state()
    try:
        with CheckpointManager(state, local=place, verify=True) as manager:
            manager.save()
            manager.wait()
        torch.manual_seed(99)
        with CheckpointManager(state, local=place) as manager:
            assert manager.restore()
    except (ClientError, OSError) as error:
        return str(error)
    return torch.equal(torch.get_rng_state(), before), state[
        "queue"
    ].mean().item()


def test_values_of_ranks_may_differ_where_nothing_trains_them(tmp_path):
    run = partial(rank_that_differs, path=tmp_path, case="one model")
    # Random numbers of their own, and the values of the first.
    assert run_ranks(2, run) == [(True, 0.0), (True, 0.0)]
    # More ranks than before have random numbers of their own, too.
    numbers = run_ranks(3, partial(random_after_restore, path=tmp_path))
    assert len(set(numbers)) == 3


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("two models", r"different values of .*weight'\], which an optimizer"),
        ("no state", "rank 1: OSError: no state here|no state here"),
        ("full disk", "rank 1: .* a broken disk"),
    ],
)
def test_error_of_a_rank_is_one_of_all(tmp_path, case, message):
    run = partial(rank_that_differs, path=tmp_path, case=case)
    for result in run_ranks(2, run):
        assert re.search(message, result)


def random_after_restore(rank, path):
    module = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = {"module": module, "optimizer": optimizer, "queue": None}
    with CheckpointManager(state, local=path) as manager:
        assert manager.restore()
    return torch.rand(1).item()


def test_optimizer_that_came_later_waits_too(tmp_path, monkeypatch):
    slow = SlowWrites(monkeypatch)
    module = nn.Linear(300, 300)
    state = {"module": module, "optimizer": None}
    with CheckpointManager(state, local=tmp_path) as manager:
        state["optimizer"] = torch.optim.SGD(module.parameters(), lr=1.0)
        module(torch.ones(1, 300)).sum().backward()
        manager.save()
        threading.Timer(0.5, slow.may_begin.set).start()
        state["optimizer"].step()
        assert slow.may_begin.is_set()
    with pytest.raises(ClientError, match="has ended with its block"):
        manager.save()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (deque([1]), "value of type deque"),
        (torch.eye(3).to_sparse(), r"\['value'\] of type Tensor"),
        (SimpleNamespace(state_dict=dict), r"\['value'\] of type Simple"),
    ],
)
def test_value_that_cannot_be_written_is_named(tmp_path, value, message):
    manager = CheckpointManager({"value": value}, local=tmp_path)
    with manager, pytest.raises(ClientError, match=message):
        manager.save()


def test_loss_with_its_graph_and_odd_files(tmp_path):
    weight = torch.ones(3, requires_grad=True)
    state = {"losses": [weight.sum()]}
    with CheckpointManager(state, local=tmp_path) as manager:
        manager.save()
    (tmp_path / STEP_8).mkdir()
    with CheckpointManager({"losses": []}, local=tmp_path) as manager:
        assert manager.restore()


def test_refused_manager_leaves_no_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ClientError, match="not a Swift location"):
        CheckpointManager({}, remote="swift://")
    gc.collect()
    assert not os.listdir(tmp_path)


def test_file_of_thousands_of_tensors_is_small(tmp_path):
    values = [torch.ones(10) for _ in range(1000)]
    with CheckpointManager({"values": values}, local=tmp_path) as manager:
        manager.save()
    torch.save(values, tmp_path / "stock.pt")
    size = (tmp_path / f"step-{1:012}.pt").stat().st_size
    assert size < 1.2 * (tmp_path / "stock.pt").stat().st_size
