"""Virtual nodes on batches from memory: the same bits, the right mean."""

from __future__ import annotations

import copy
import io
import logging
from functools import partial, partialmethod

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import node_training
from forked_ranks import run_ranks
from hapi_protocol.errors import ClientError
from hapi_training import VirtualNodes
from hapi_training.virtual_nodes import exchange
from node_training import BATCH, CLASSES, batches, digest, network, train


def many_runs(rank, num_ranks=1):
    """Digests by name; those of "sgd" are equal in all ways."""
    digests = {
        "sgd": train(rank),
        "adamw": train(rank, optimizer="adamw"),
        "3 nodes": train(rank, num_nodes=3),
        "6 nodes": train(rank, num_nodes=6),
    }
    if num_ranks == 2:
        uneven = train(rank, counts=(5, 3))
        moved = train(rank, balance_at=1)
        assert [uneven, moved] == [digests["sgd"]] * 2
    exchange.CHUNK_BYTES = 1000
    assert train(rank) == digests["sgd"]
    return digests


@pytest.fixture(scope="module")
def alone():
    (digests,) = run_ranks(1, many_runs)
    assert len(set(digests.values())) == len(digests)
    return digests


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_bits_are_equal_on_any_number_of_workers(alone, num_ranks):
    """On 4 and 8 they are functional tests."""
    run = partial(many_runs, num_ranks=num_ranks)
    assert run_ranks(num_ranks, run) == [alone] * num_ranks


def _train_by_all_reduce(rank, num_ranks):
    """A plain loop of data parallelism: control."""
    exchange.Exchange.sum = partialmethod(_summed, num_ranks)
    return train(rank)


def _summed(self, num_ranks, sums, has_value, like):
    results = []
    for number in range(len(like)):
        values = [
            tensors[number]
            for tensors in sums.values()
            if tensors[number] is not None
        ]
        if values and num_ranks > 1:
            values = [sum(values)]
            torch.distributed.all_reduce(values[0])
        results.append(sum(values) if values else None)
    return results


def test_controls_have_other_bits(alone):
    for num_ranks in (1, 3):
        control = run_ranks(
            num_ranks, partial(_train_by_all_reduce, num_ranks=num_ranks)
        )
        assert (control[0] == alone["sgd"]) is (num_ranks == 1)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(192, 16)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, images):
        return self.last(torch.tanh(self.first(images.flatten(1))))


def gradients_of(module):
    return [p.grad for p in module.parameters()]


def whole_batch(module, images, labels, weights=None):
    losses = cross_entropy(module(images), labels, reduction="none")
    weights = torch.ones_like(losses) if weights is None else weights
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    return loss.item()


def assert_close(actual, expected):
    for mine, theirs in zip(actual, expected, strict=True):
        difference = (mine - theirs).abs().max() / theirs.abs().max()
        assert difference <= 1e-10


@pytest.mark.parametrize("size", [BATCH, 13, 5])
def test_gradient_is_that_of_the_whole_batch(size):
    module = network(Plain).double()
    other = copy.deepcopy(module)
    (images, labels), *_ = batches(1, size)
    images = images.double()
    expected = whole_batch(other, images, labels)
    for step in VirtualNodes(module, 8).steps([(images, labels)]):
        for some, targets in step:
            step.backward(cross_entropy(module(some), targets))
    assert step.loss == pytest.approx(expected, rel=1e-10)
    assert_close(gradients_of(module), gradients_of(other))


def test_gradient_is_right_with_ignored_targets():
    """Node means alone would weigh a node with few targets as much."""
    module = network(Plain).double()
    other, third = copy.deepcopy(module), copy.deepcopy(module)
    (images, labels), *_ = batches(1)
    images = images.double()
    labels[3::8] = -100
    labels[:8] = torch.where(torch.arange(8) == 3, labels[:8], -100)
    labels[11] = 2
    whole_batch(other, images[labels >= 0], labels[labels >= 0])
    for nodes_module, weighted in ((module, True), (third, False)):
        nodes = VirtualNodes(nodes_module, 8)
        for step in nodes.steps([(images, labels)]):
            for some, targets in step:
                loss = cross_entropy(nodes_module(some), targets)
                count = int((targets >= 0).sum())
                step.backward(loss, count if weighted else None)
    assert_close(gradients_of(module), gradients_of(other))
    with pytest.raises(AssertionError):
        assert_close(gradients_of(third), gradients_of(other))


def test_node_without_targets_weighs_nothing():
    module = network(Plain)
    (images, labels), *_ = batches(1)
    labels[2::8] = -100
    for step in VirtualNodes(module, 8).steps([(images, labels)]):
        for some, targets in step:
            loss = cross_entropy(module(some), targets)
            step.backward(loss, (targets >= 0).sum())
    assert all(p.grad.isfinite().all() for p in module.parameters())


def test_gradients_are_added_to_earlier_ones():
    module, data = network(Plain), batches(2)
    nodes = VirtualNodes(module, 4)
    separate = []
    for step in nodes.steps(data):
        for some, targets in step:
            step.backward(cross_entropy(module(some), targets))
        separate.append([p.grad.clone() for p in module.parameters()])
        if len(separate) == 1:
            first = [p.grad for p in module.parameters()]
    assert all(
        torch.equal(both, p.grad)
        for both, p in zip(first, module.parameters(), strict=True)
    )
    assert not torch.equal(separate[0][0], separate[1][0])


def test_random_numbers_and_buffers_are_the_callers_afterwards():
    module = network()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    running = module.body[1].running_mean.clone()
    means = []
    for step in VirtualNodes(module, 4).steps(batches(1)):
        for images, labels in step:
            torch.testing.assert_close(module.body[1].running_mean, running)
            step.backward(cross_entropy(module(images), labels))
            means.append(module.body[1].running_mean.clone())
    torch.testing.assert_close(
        module.body[1].running_mean, torch.stack(means).mean(0)
    )
    assert module.body[1].num_batches_tracked == 1
    assert torch.equal(torch.rand(3), expected)


def test_constant_buffers_keep_their_bits():
    """A mean of three equal numbers is not always that number."""
    module = network(Plain)
    module.register_buffer("table", torch.rand(1000))
    before = module.table.clone()
    for step in VirtualNodes(module, 3).steps(batches(3)):
        for images, labels in step:
            step.backward(cross_entropy(module(images), labels))
    assert torch.equal(module.table, before)


def test_run_goes_on_from_its_state():
    data = batches(6)
    whole, parts = network(), network()
    for module, pieces in ((whole, [data]), (parts, [data[:2], data[2:]])):
        state = None
        updates = node_training.optimizer_of(module, "adamw")
        for piece in pieces:
            nodes = VirtualNodes(module, 4, seed=2)
            if state:
                nodes.load_state_dict(state)
            for step in nodes.steps(piece):
                for images, labels in step:
                    step.backward(cross_entropy(module(images), labels))
                updates.step()
                updates.zero_grad()
            file = io.BytesIO()
            torch.save(nodes.state_dict(), file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
    assert digest(whole.state_dict()) == digest(parts.state_dict())
    assert state["step"] == 6


def test_evaluation_has_no_backward_and_counts_no_step():
    module = network().eval()
    nodes = VirtualNodes(module, 4)
    with torch.no_grad():
        seen = sum(
            nodes.sum(len(labels))
            for step in nodes.steps(batches(2, 7))
            for _, labels in step
        )
    assert seen == BATCH + 7
    assert nodes.step == 0


def one_node(step, module):
    for images, labels in step:
        step.backward(cross_entropy(module(images), labels))
        break


def without_backward(step, module):
    for _ in step:
        pass


def twice(step, module):
    for images, labels in step:
        loss = cross_entropy(module(images), labels)
        step.backward(loss, 0)
        step.backward(loss)


def not_a_mean(step, module):
    for images, labels in step:
        step.backward(cross_entropy(module(images), labels, reduction="none"))


def no_tensor(step, module):
    for _ in step:
        step.backward(1.0)


def negative(step, module):
    for images, labels in step:
        step.backward(cross_entropy(module(images), labels), -1)


def again(step, module):
    for _ in range(2):
        for images, labels in step:
            step.backward(cross_entropy(module(images), labels))


def early_loss(step, module):
    assert step.loss


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (one_node, "step 0 was left before its last virtual node"),
        (without_backward, "no backward.. for node 0; call it once"),
        (twice, "backward.. twice for node 0"),
        (not_a_mean, r"a loss of shape \(6,\); give a mean"),
        (no_tensor, "got a loss 1.0; give a tensor"),
        (negative, "weight=-1.0; give a finite number, at least 0"),
        (again, "was iterated over before"),
        (early_loss, "has a loss only after its last backward"),
    ],
)
def test_wrong_loop_is_an_error(loop, message):
    module = network(Plain)

    def run():
        for step in VirtualNodes(module, 4).steps(batches(2)):
            loop(step, module)

    with pytest.raises(ClientError, match=message):
        run()
    if loop is not again:
        assert all(p.grad is None for p in module.parameters())


def sharded():
    data = TensorDataset(*batches(1)[0])
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    return DataLoader(data, 8, sampler=sampler)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (sharded, "a DataLoader with a DistributedSampler; give it"),
        (lambda: 5, "is a int; give a FeatureDataset"),
        (lambda: [(torch.ones(3), torch.ones(4))], "first dimensions are"),
        (lambda: [("a", "b")], r"\['str', 'str'\]; virtual nodes divide"),
        (lambda: [torch.ones(0, 3)], "equal, and not 0"),
    ],
)
def test_data_that_cannot_be_divided_is_refused(data, message):
    with pytest.raises(ClientError, match=message):
        next(VirtualNodes(network(Plain), 4).steps(data()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VirtualNodes(network(), 0), "num_nodes is 0"),
        (lambda: VirtualNodes(network(), 2, seed=-1), "seed is -1"),
        (
            lambda: VirtualNodes(nn.DataParallel(network()), 2),
            "DataParallel, which sums gradients itself; give the bare",
        ),
        (lambda: VirtualNodes(None, 2), "module is a NoneType; give a torch"),
        (
            lambda: VirtualNodes(network(), 2, timeout_seconds=-1),
            "timeout_seconds is -1",
        ),
        (
            lambda: next(VirtualNodes(network(), 2).steps([], [1])),
            "the state of steps.. is a list",
        ),
        (
            lambda: VirtualNodes(network().requires_grad_(False), 2),
            "no parameter to train",
        ),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ClientError, match=message):
        make()


def test_state_of_another_run_is_refused(caplog):
    nodes = VirtualNodes(network(), 4)
    state = nodes.state_dict()
    for changes, message in (
        ({"num_nodes": 8}, "num_nodes is 4 here and 8 in the state"),
        ({"threads": 99}, "threads is .* here and 99 in the state; give all"),
        ({"torch": "1.0"}, "torch is '.*' here and '1.0' in the state"),
        ({"version": 9}, "is {.*; give a state_dict"),
        (None, "is None; give a state_dict"),
    ):
        with pytest.raises(ClientError, match=message):
            nodes.load_state_dict(changes and {**state, **changes})
    lax = VirtualNodes(network(), 4, strict=False)
    with caplog.at_level(logging.WARNING):
        lax.load_state_dict({**state, "threads": 99})
    assert "would not give the same bits" in caplog.text


def _with_threads(rank):
    torch.set_num_threads(1 + rank)
    return train(rank)


def _with_other_data(rank):
    return train(rank, data=batches(seed=rank))


def _ends_early(rank):
    import os

    module = network()
    for step in VirtualNodes(module, 8).steps(batches()):
        for images, labels in step:
            if rank:
                os._exit(0)
            step.backward(cross_entropy(module(images), labels))


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        (_with_threads, "bad_configuration", "threads is 1 here and 2 on"),
        (
            _with_other_data,
            "bad_configuration",
            "has other samples on some of the 2 workers",
        ),
    ],
)
def test_workers_that_differ_are_refused(function, code, message):
    for error in run_ranks(2, function):
        assert isinstance(error, ClientError)
        assert error.code == code
        assert message.replace("1 here and 2", "") in error.message or (
            "threads" in error.message
        )


def test_more_workers_than_nodes_are_refused():
    for error in run_ranks(3, partial(train, num_nodes=2)):
        assert "3 workers cannot share 2 virtual nodes" in str(error)


def test_loss_that_is_not_finite_is_named_once(caplog):
    module = network(Plain)
    (images, labels), *_ = data = batches(3)
    data[1] = (images * torch.nan, labels)
    data[2] = (images * torch.nan, labels)
    for step in VirtualNodes(module, 4).steps(data):
        for some, targets in step:
            step.backward(cross_entropy(module(some), targets))
    assert caplog.text.count("step 1 has the loss nan") == 1
    assert "step 2" not in caplog.text
    assert all(p.grad.isnan().any() for p in module.parameters())


class Observed(nn.Module):
    """Has a running maximum, as observers of quantisation have."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(192, CLASSES)
        self.register_buffer("most", torch.tensor([-torch.inf]))

    def forward(self, images):
        self.most.copy_(torch.maximum(self.most, images.max()))
        return self.layer(images.flatten(1))


def test_buffer_may_begin_with_an_infinite_value():
    module, data = network(Observed), batches(2)
    most = []
    for step in VirtualNodes(module, 1).steps(data):
        for images, labels in step:
            most.append(images.max().item())
            step.backward(cross_entropy(module(images), labels))
    assert module.most.item() == pytest.approx(max(most))


class Late(Plain):
    def forward(self, images):
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.zeros(1))
        return super().forward(images)


def test_buffer_that_is_made_in_a_step_is_refused():
    module = network(Late)

    def run():
        for step in VirtualNodes(module, 2).steps(batches(1)):
            for images, labels in step:
                step.backward(cross_entropy(module(images), labels))

    with pytest.raises(ClientError, match="run it once on a batch"):
        run()


def test_optimizer_of_other_parameters_is_refused():
    module, other = network(Plain), nn.Linear(2, 2)
    updates = torch.optim.SGD([*module.parameters(), *other.parameters()])
    nodes = VirtualNodes(module, 2)
    with pytest.raises(ClientError, match="that are not of the module"):
        next(nodes.steps(batches(1), {"optimizer": updates}))


def _sums(rank):
    nodes = VirtualNodes(network(Plain), 2)
    sums = [nodes.sum(value) for value in (3, True, 0.1, 16777217.0)]
    of_bytes = nodes.sum(torch.tensor([200], dtype=torch.uint8))
    # A worker without samples has nothing but the integer it began with.
    mixed = nodes.sum(0 if rank else 1.5)
    with pytest.raises(ClientError, match="of another shape on another"):
        nodes.sum(torch.ones(2 + rank))
    return [*sums, of_bytes.tolist(), mixed]


def test_sum_of_all_workers_loses_no_digits():
    for sums in run_ranks(2, _sums):
        assert sums == [6, 2, 0.2, 33554434.0, [400], 1.5]
        assert type(sums[1]) is int
