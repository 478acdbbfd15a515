"""Virtual nodes in loops as people write them: the same bits on two ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

from forked_ranks import run_ranks
from hapi_training import VirtualNodes
from node_training import Net, batches, digest, network, optimizer_of


class Tied(Net):
    """Has tied weights, and some that only some nodes use."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.scale.weight
        self.rare = nn.Linear(8, 8)

    def forward(self, images):
        images = self.again(self.scale(images))
        if images.sum() > 0:
            images = self.rare(images)
        return super().forward(images)


class Masks(Net):
    """Buffers that a mean could change, and one of integers."""

    def __init__(self):
        super().__init__()
        self.register_buffer(
            "mask", torch.tensor([0.1, -0.0, -torch.inf, torch.nan])
        )
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, images):
        self.seen[0] += 1
        self.seen[1] += int(images.sum() > 0)
        return super().forward(images)


def plain(rank, kind=Net, dtype=torch.float32, num_nodes=6):
    module = network(kind).to(dtype)
    updates = optimizer_of(module, "adamw")
    nodes, losses = VirtualNodes(module, num_nodes), []
    for step in nodes.steps(batches(5)):
        for images, labels in step:
            loss = cross_entropy(module(images.to(dtype)).float(), labels)
            step.backward(loss)
        updates.step()
        updates.zero_grad()
        losses.append(step.loss)
    if kind is Masks:
        bits = module.mask.view(torch.int32)
        assert torch.equal(bits, network(Masks).mask.view(torch.int32))
        assert module.seen[0] == 5
    state = updates.state_dict()
    return digest(
        [v.float() for v in module.state_dict().values()], losses, str(state)
    )


def tied(rank):
    return plain(rank, Tied)


def masks(rank):
    return plain(rank, Masks)


def bfloat16(rank):
    return plain(rank, dtype=torch.bfloat16)


def compiled(rank):
    module = network()
    updates = optimizer_of(module, "sgd")
    # Without a compiler for C++, which takes minutes.
    fast = torch.compile(module, backend="aot_eager")
    nodes = VirtualNodes(fast, 8)
    for step in nodes.steps(batches(3)):
        for images, labels in step:
            step.backward(cross_entropy(fast(images), labels))
        updates.step()
        updates.zero_grad()
    assert module.body[1].num_batches_tracked == 3
    assert module.body[1].running_mean.abs().sum() > 0
    return digest(module.state_dict())


def scaled(rank):
    """Autocast, a scaler, clipping, a schedule and a moving average."""
    module = network()
    average = AveragedModel(module)
    updates = optimizer_of(module, "sgd")
    schedule = torch.optim.lr_scheduler.StepLR(updates, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    nodes = VirtualNodes(module, 8)
    for step in nodes.steps(batches(5)):
        for images, labels in step:
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(module(images), labels)
            step.backward(scaler.scale(loss))
        scaler.unscale_(updates)
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        scaler.step(updates)
        scaler.update()
        updates.zero_grad()
        schedule.step()
        average.update_parameters(module)
    return digest(module.state_dict(), average.state_dict())


def accumulated(rank):
    """Two steps of gradients for each of the optimizer."""
    module = network().to(memory_format=torch.channels_last)
    updates = optimizer_of(module, "sgd")
    nodes = VirtualNodes(module, 8)
    for number, step in enumerate(nodes.steps(batches(4))):
        for images, labels in step:
            images = images.to(memory_format=torch.channels_last)
            step.backward(cross_entropy(module(images), labels))
        if number % 2:
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            updates.step()
            updates.zero_grad()
    return digest([v.contiguous() for v in module.state_dict().values()])


def mappings(rank):
    """Batches as those of Hugging Face."""
    module = network()
    updates = optimizer_of(module, "sgd")
    data = [{"pixels": x, "targets": [y]} for x, y in batches(3, 13)]
    for step in VirtualNodes(module, 8).steps(data):
        for batch in step:
            scores = module(batch["pixels"])
            step.backward(cross_entropy(scores, batch["targets"][0]))
        updates.step()
        updates.zero_grad()
    return digest(module.state_dict())


LOOPS = [tied, masks, bfloat16, compiled, scaled, accumulated, mappings]


def all_loops(rank):
    return {loop.__name__: loop(rank) for loop in LOOPS}


@pytest.fixture(scope="module")
def digests():
    """Digests of each loop: alone, and on two ranks."""
    return [*run_ranks(1, all_loops), *run_ranks(2, all_loops)]


@pytest.mark.parametrize("loop", LOOPS)
def test_loop_gives_the_same_bits_on_two_ranks(digests, loop):
    alone, *others = [by_name[loop.__name__] for by_name in digests]
    assert others == [alone, alone]


def unequal(rank):
    """One rank is given fewer nodes because it is slow."""
    import time

    module = network()
    updates = optimizer_of(module, "sgd")
    nodes, gains = VirtualNodes(module, 8), []
    for step in nodes.steps(batches(8)):
        for images, labels in step:
            # As a rank at a third of the speed.
            time.sleep(0.12 if rank else 0.04)
            step.backward(cross_entropy(module(images), labels))
        updates.step()
        updates.zero_grad()
        if step.number in (3, 6):
            gains.append(nodes.balance())
    return digest(module.state_dict()), len(nodes.mine), gains


def test_slow_rank_gets_fewer_nodes():
    (alone,) = run_ranks(1, unequal)
    first, second = run_ranks(2, unequal)
    assert alone[0] == first[0] == second[0]
    # 4 and 4 nodes at 1 and 3: with 6 and 2 a step takes half as long.
    assert first[1] > second[1]
    assert first[2][0] >= 1.25
    assert first[2] == second[2]


def test_module_is_not_changed_by_a_failing_loop():
    module = network()
    before = copy.deepcopy(module.state_dict())

    def run():
        for step in VirtualNodes(module, 4).steps(batches(1)):
            for images, labels in step:
                step.backward(cross_entropy(module(images), labels))
                if step.number == 0:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in module.parameters())
