"""Partial backward passes: the same gradients where they are kept."""

from __future__ import annotations

import copy
import logging
import threading

import pytest
import torch
import torchvision
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from forked_ranks import run_ranks
from hapi_client import split_model
from hapi_protocol.errors import ClientError
from hapi_training import PartialBackward, VirtualNodes, freeze_schedule
from hapi_training.partial_backward import Segments
from hapi_training.virtual_nodes.assignment import even
from node_training import BATCH, CLASSES, batches, digest, network, train

SEGMENTS = 4


class Deep(nn.Module):
    """Layers of unlike cost, with all that makes a node's pass its own."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.3)),
            *(nn.Flatten(), nn.Linear(128, 32), nn.Tanh()),
        )
        self.head = nn.Linear(32, CLASSES)
        self.unused = nn.Linear(3, 3)

    def forward(self, images):
        return self.head(self.body(images))


def measured(module, *inputs, segments=SEGMENTS):
    """The segments of a module, as its first step finds them."""
    found = Segments(module, PartialBackward(segments), segments)
    found.begin_step()
    with found.node(0, 0):
        loss = module(*inputs).sum()
        found.end_forward()
        loss.backward()
    found.use_measured()
    module.zero_grad()
    return found


def step_of_depth(first, segments=SEGMENTS):
    return freeze_schedule.depth_order(segments).index(first)


@pytest.mark.parametrize("num_segments", range(2, 17))
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_workers_have_equal_work_wherever_numbers_allow(
    num_segments, num_ranks
):
    for per_depth in range(1, 9):
        num_nodes = num_segments * per_depth
        total = per_depth * num_segments * (num_segments - 1) // 2
        if num_nodes % num_ranks or total % num_ranks:
            continue
        if num_ranks > num_nodes // num_ranks and num_ranks > per_depth:
            # Single nodes, or pairs, of unlike depth.
            continue
        for step in range(num_segments):
            depths = [
                freeze_schedule.depth(step, node, num_nodes, num_segments)
                for node in range(num_nodes)
            ]
            assert sorted(depths) == sorted([*range(num_segments)] * per_depth)
            sums = {
                sum(depths[node] for node in nodes)
                for nodes in even(num_nodes, num_ranks)
            }
            assert len(sums) == 1, (num_nodes, step)


def test_simple_schedule_gives_workers_unlike_work():
    """Control: depth = (node + step) % segments."""
    sums = [sum(node % SEGMENTS for node in nodes) for nodes in even(8, 2)]
    assert sums == [4, 8]


@pytest.mark.parametrize(
    ("costs", "starts"),
    [
        ([1, 1, 1, 1], [0, 1, 2, 3]),
        ([9, 1, 1, 1], [0, 1, 2, 3]),
        ([1, 1, 1, 1, 4, 4, 4], [0, 4, 5, 6]),
        ([4, 4, 4, 1, 1, 1, 1], [0, 1, 2, 3]),
    ],
)
def test_segments_have_equal_costs(costs, starts):
    assert freeze_schedule.segment_starts(costs, SEGMENTS) == starts


def resnet_tail():
    """ResNet-18 from layer2 on, as a user has it, and its features."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = torchvision.models.resnet18(num_classes=CLASSES)
        _, tail = split_model(model, "layer1")
        return tail.train(), torch.randn(1, 64, 56, 56)


def pass_of(module, segments, inputs, first):
    """Gradients, loss, buffers, FLOPs and saved bytes of one node."""
    module = copy.deepcopy(module)
    alone = Segments(module, PartialBackward(SEGMENTS), SEGMENTS)
    alone.table = segments.table
    alone.begin_step()
    weights = {p.data_ptr() for p in module.parameters()}
    saved = {}

    def note(tensor):
        if tensor.data_ptr() not in weights:
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    torch.manual_seed(1)
    with alone.node(step_of_depth(first), 0):
        with saved_tensors_hooks(note, lambda tensor: tensor):
            loss = module(inputs).square().mean()
        counter = FlopCounterMode(display=False)
        with counter:
            loss.backward()
    assert all(p.requires_grad for p in module.parameters())
    gradients = {n: p.grad for n, p in module.named_parameters()}
    rest = digest(loss, dict(module.named_buffers()))
    return gradients, rest, counter.get_total_flops(), sum(saved.values())


def test_kept_gradients_have_the_same_bits_and_the_rest_is_not_computed():
    tail, inputs = resnet_tail()
    segments = measured(tail, inputs)
    assert [*segments.table] == [n for n, _ in tail.named_parameters()]
    whole, rest, operations, saved = pass_of(tail, segments, inputs, 0)
    forward_of = {}
    for name, module in tail.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(
                lambda module, _, out, name=name: forward_of.update(
                    {
                        f"{name}.weight": 2
                        * module.weight.numel()
                        * out.numel()
                        // out.shape[1]
                    }
                )
            )
    copy.deepcopy(tail)(inputs)
    least = saved
    for first in range(SEGMENTS):
        kept, other, flops, bytes_saved = pass_of(
            tail, segments, inputs, first
        )
        assert other == rest
        for name, segment in segments.table.items():
            assert (kept[name] is None) is (segment < first), name
            if kept[name] is not None:
                assert digest(kept[name]) == digest(whole[name]), name
        # Two products a layer, but for the gradient of inputs that nobody
        # trains before.
        names = [n for n in forward_of if segments.table[n] >= first]
        analytic = 2 * sum(forward_of[name] for name in names)
        analytic -= sum(forward_of[n] for n in names if _is_lowest(n, names))
        assert flops == pytest.approx(analytic, rel=1e-3)
        assert bytes_saved <= least
        least = bytes_saved
    assert least < saved / 3
    assert flops < operations / 4


def _is_lowest(name, names):
    """True for a layer with inputs of layers that are not trained."""
    lowest, *_ = names
    is_shortcut = "downsample" in name and name[:8] == lowest[:8]
    return name == lowest or is_shortcut


def many_runs(rank):
    torch.manual_seed(5)
    return {
        "sgd": train(rank, module=network(Deep), partial=PartialBackward(4)),
        "adamw": train(
            rank, 4, "adamw", module=network(Deep), partial=PartialBackward(2)
        ),
        "late": train(
            rank,
            module=network(Deep),
            partial=PartialBackward(4, warmup_steps=2),
        ),
        "whole": train(rank, module=network(Deep)),
    }


@pytest.fixture(scope="module")
def alone():
    (digests,) = run_ranks(1, many_runs)
    assert len(set(digests.values())) == len(digests)
    return digests


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bits_are_equal_on_any_number_of_workers(alone, num_ranks):
    assert run_ranks(num_ranks, many_runs) == [alone] * num_ranks


def _train_by_rank(rank):
    freeze_schedule_depth = freeze_schedule.depth
    from hapi_training import partial_backward

    partial_backward.depth = lambda step, node, *sizes: freeze_schedule_depth(
        step, rank, *sizes
    )
    return train(rank, module=network(Deep), partial=PartialBackward(4))


def test_depth_by_rank_gives_other_bits(alone):
    """Control: as in SPB, where the worker decides."""
    two = run_ranks(2, _train_by_rank)
    assert two[0] == two[1] != alone["sgd"]


def gradients(module, partial, data, *, steps=1):
    """The last step's gradients without its update."""
    nodes = VirtualNodes(module, 4, partial=partial)
    for step in nodes.steps(data * steps):
        module.zero_grad()
        for images, labels in step:
            step.backward(cross_entropy(module(images), labels))
    return {name: p.grad for name, p in module.named_parameters()}, nodes


class Chain(nn.Sequential):
    """Two layers of equal cost: without dropout, sums can be checked."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(192, 64), nn.Tanh())
        self.append(nn.Linear(64, 192)).append(nn.Linear(192, CLASSES))


def test_segment_has_the_mean_of_the_nodes_that_train_it():
    data = batches(1)
    module = network(Chain).double()
    images, labels = data[0][0].double(), data[0][1]
    mine, nodes = gradients(
        module, PartialBackward(2), [(images, labels)], steps=2
    )
    segments = nodes._segments
    assert set(segments.table.values()) == {0, 1}
    whole = torch.zeros(BATCH, dtype=torch.bool)
    for node in range(4):
        whole[node::4] = segments.depth(1, node) == 0
    assert whole.sum() == BATCH / 2
    for segment, rows in ((0, whole), (1, torch.ones_like(whole))):
        module.zero_grad()
        cross_entropy(module(images[rows]), labels[rows]).backward()
        for name, parameter in module.named_parameters():
            if segments.table[name] == segment:
                assert torch.allclose(mine[name], parameter.grad, rtol=1e-10)


def test_run_goes_on_from_its_state():
    def run(first, last, states=None):
        module = network(Deep).train()
        updates = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        nodes = VirtualNodes(module, 4, partial=PartialBackward(4))
        own = [module, updates, nodes]
        for value, state in zip(own, states or [], strict=False):
            value.load_state_dict(state)
        for step in nodes.steps(batches(8)[first:last]):
            with torch.no_grad():
                # Evaluations leave the segments as they are.
                for other in nodes.steps(batches(1)):
                    for images, _ in other:
                        network(Deep)(images)
            for images, labels in step:
                # As to count what is trained.
                assert module.head.weight.requires_grad
                step.backward(cross_entropy(module(images), labels))
            updates.step()
            updates.zero_grad()
        return [copy.deepcopy(value.state_dict()) for value in own]

    whole = run(0, 8)[:2]
    assert digest(run(3, 8, run(0, 3))[:2]) == digest(whole)
    states = run(0, 3)
    del states[2]["segment_of"]
    assert digest(run(3, 8, states)[:2]) != digest(whole)
    for other in (None, PartialBackward(2), PartialBackward(4, 9)):
        nodes = VirtualNodes(network(Deep), 4, partial=other, strict=False)
        with pytest.raises(ClientError, match=r"segments is|warmup_steps is"):
            nodes.load_state_dict(run(0, 1)[2])
    for name, value in (("epoch", -1), ("step", "1"), ("segment_of", {1: 2})):
        with pytest.raises(ClientError, match="the state of virtual nodes is"):
            nodes.load_state_dict({**run(0, 1)[2], name: value})


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs).tanh()
        return inputs


class Reads(Tied):
    def forward(self, inputs):
        if self.layers[1].weight.requires_grad:
            inputs = inputs * 2
        return super().forward(inputs)


class ReadsInputs(Tied):
    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
            if inputs.grad_fn is None:
                inputs = inputs.tanh()
        return inputs


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(16, 16) for _ in range(3))
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 4))

    def forward(self, inputs):
        for layer in self.layers:
            inputs, _ = layer(inputs)
        return self.head(inputs)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.body = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        self.reentrant = reentrant

    def forward(self, inputs):
        return checkpoint(
            self.body, self.first(inputs), use_reentrant=self.reentrant
        )


def test_tied_parameter_is_trained_with_its_first_use(caplog):
    torch.manual_seed(0)
    segments = measured(Tied(), torch.randn(2, 16))
    assert segments.table["layers.0.weight"] == 0
    assert segments.table["layers.3.bias"] == 3
    assert "such as 'layers.0.weight' in 0 and 3" in caplog.text


def test_layers_of_other_kinds_are_divided():
    torch.manual_seed(0)
    segments = measured(Recurrent(), torch.randn(2, 16))
    assert sorted(set(segments.table.values())) == [0, 1, 2, 3]
    assert segments.table["head.parametrizations.weight.original"] == 3


def test_frozen_layers_of_a_transformer_compute_the_same_bits():
    """torch has another way for those that are not trained."""
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(16, 2, 32) for _ in range(4))
    module, inputs = nn.Sequential(*layers).eval(), torch.randn(5, 2, 16)
    segments = measured(module, inputs)
    rests = {pass_of(module, segments, inputs, n)[1] for n in range(SEGMENTS)}
    assert len(rests) == 1
    assert torch.backends.mha.get_fastpath_enabled()


def test_loss_of_layers_that_a_node_does_not_train_adds_nothing():
    module = network(Chain)
    nodes = VirtualNodes(module, 4, partial=PartialBackward(2))
    for step in nodes.steps(batches(2)):
        module.zero_grad()
        for images, _ in step:
            layers = [*module][: 5 if step.number == 0 else 2]
            outputs = nn.Sequential(*layers)(images)
            step.backward(outputs.square().mean())
    assert module[1].weight.grad is not None
    assert module[4].weight.grad is None


@pytest.mark.parametrize("first", range(SEGMENTS))
def test_checkpointed_layers_may_lie_across_segments(first):
    torch.manual_seed(0)
    module, inputs = Checkpointed(reentrant=False), torch.randn(2, 16)
    segments = measured(module, inputs)
    whole, *_ = pass_of(module, segments, inputs, 0)
    kept, *_ = pass_of(module, segments, inputs, first)
    for name, segment in segments.table.items():
        expected = None if segment < first else digest(whole[name])
        assert (kept[name] if segment < first else digest(kept[name])) == (
            expected
        )


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(16, 4), "has 1 layers .* fewer than 4 segments"),
        (Reads(), "forward pass of Reads reads requires_grad of a tensor"),
        (ReadsInputs(), "reads grad_fn of a tensor"),
        (Checkpointed(reentrant=True), "use_reentrant=False"),
    ],
)
def test_module_that_cannot_be_cut_is_refused(module, message):
    with pytest.raises(ClientError, match=message):
        measured(module, torch.randn(2, 16))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PartialBackward(1), "segments.* 2"),
        (lambda: PartialBackward(4, -1), "warmup_steps"),
        (lambda: VirtualNodes(Tied(), 8, partial=4), "give a PartialBackward"),
        (
            lambda: VirtualNodes(Tied(), 8, partial=PartialBackward(3)),
            "3 segments do not divide 8 virtual nodes.* give 9",
        ),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ClientError, match=message):
        make()


def test_where_nothing_is_gained_is_warned_of(caplog):
    caplog.set_level(logging.WARNING)
    data = batches(3, last=2)
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 2**15))
    module.append(nn.Linear(2**15, 5))
    gradients(module, PartialBackward(2), data[:1])
    assert caplog.text == ""
    gradients(network(Chain), PartialBackward(2), data[:1])
    assert "of a virtual node take 0.772 million" in caplog.text
    gradients(network(Chain), PartialBackward(2), data[1:])
    assert "trains the first 1 of 2 segments in step 1" in caplog.text

    def slow():
        for batch in data[:2] * 3:
            threading.Event().wait(0.2)
            yield batch

    nodes = VirtualNodes(network(Chain), 4, partial=PartialBackward(2))
    module = nodes._module
    for step in nodes.steps(slow()):
        for images, labels in step:
            step.backward(cross_entropy(module(images), labels))
    assert "went into waiting for data" in caplog.text


def test_layers_are_measured_again_when_others_are_trained():
    module = network(Deep)
    module.body[0].requires_grad_(False)
    nodes = VirtualNodes(module, 4, partial=PartialBackward(2))
    tables = []
    for number, step in enumerate(nodes.steps(batches(4))):
        for images, labels in step:
            step.backward(cross_entropy(module(images), labels))
        tables.append(dict(nodes._segments.table))
        if number == 1:
            module.body[0].requires_grad_(True)
    assert "body.0.weight" not in tables[1]
    assert tables[3]["body.0.weight"] == 0
