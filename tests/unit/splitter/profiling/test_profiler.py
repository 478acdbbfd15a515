"""Profiles: what every cut costs, measured without a trace."""

import itertools
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from hapi_protocol.errors import UnsupportedError
from hapi_protocol.profiles import ModelProfile
from hapi_splitter.freezing.split_model import split
from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.inputs.reference_image import (
    HEIGHT,
    WIDTH,
    reference_image,
    reference_seconds,
)
from hapi_splitter.numerics import numerics_tag
from hapi_splitter.profiling import profiler as profile
from hapi_splitter.profiling.memory_model import memory_requirement
from hapi_splitter.profiling.node_timer import (
    TimedWalk,
    prefix_outputs,
    timer_for,
)
from hapi_splitter.profiling.profiler import (
    MAX_PASSES,
    peak_bytes_by_cut,
    profile_model,
    profile_region,
)
from networks import small_network, small_transform
from reference_models import BranchedNet

CPU = torch.device("cpu")


def ticks():
    """Returns a clock on which each look takes a second."""
    return partial(next, itertools.count(1.0))


class Passes:
    """A clock that stands still but for forwards of the whole module.

    Each takes ``seconds`` for every sample.
    """

    def __init__(self, monkeypatch, seconds):
        self.now = 0.0
        self.batches = []
        measure = profile._BatchRun.measure

        def counted(run):
            measure(run)
            self.batches.append(run.batch)
            run.pass_seconds = seconds * run.batch
            self.now += run.pass_seconds

        monkeypatch.setattr(profile._BatchRun, "measure", counted)

    def __call__(self):
        return self.now


def profiled(frozen, *batches, **options):
    """Returns the profile, and the batches in it."""
    found = profile_region(frozen, CPU, batches=batches, **options)
    return found, [each.batch for each in found]


def small_region():
    return split(small_network(), "body", transform=small_transform()).frozen


def branched_region():
    return split(BranchedNet(), "mix", sample_shape=(3, 16, 16)).frozen


def fast_region():
    """With a cut between a convolution and its batch norm."""
    return small_region().to(CPU, fast=True)


@pytest.mark.parametrize("build", [small_region, fast_region])
def test_seconds_reach_every_cut_and_never_fall(build):
    frozen = build()
    profiles, batches = profiled(frozen, 4, 1, 4)
    assert batches == [1, 4]
    for each in profiles:
        assert len(each.cut_seconds) == frozen.num_cuts + 1
        assert each.cut_seconds[0] == 0
        assert each.cut_seconds[-1] > 0
        assert list(each.cut_seconds) == sorted(each.cut_seconds)


def test_cuts_share_the_seconds_of_the_whole_forward():
    frozen = branched_region()
    (only,), _ = profiled(frozen, 2, budget_seconds=1000, clock=ticks())
    # The whole forward is one tick, as is each call: nothing of the walk's
    # own time is left, and a cut has the share of the calls before it. The
    # first one looks up the batch's size.
    num_calls = 1 + len(frozen.program.calls)
    first = frozen.program.first_call
    assert only.cut_seconds[-1] == 1.0
    for cut in frozen.cuts:
        share = (1 + cut.node - first + 1) / num_calls
        assert only.cut_seconds[cut.index] == pytest.approx(share)


def test_cut_that_is_folded_away_costs_what_its_batch_norm_does():
    frozen = fast_region()
    (only,), _ = profiled(frozen, 2, budget_seconds=1000, clock=ticks())
    # One call is folded away, and one looks up the batch's size.
    num_calls = len(frozen.program.calls)
    convolved, normalised, following = only.cut_seconds[1:4]
    assert convolved == normalised == pytest.approx(2 / num_calls)
    assert following == pytest.approx(3 / num_calls)
    assert only.cut_seconds[-1] == 1.0


@pytest.mark.parametrize("build", [branched_region, fast_region])
def test_region_is_the_same_bit_for_bit_afterwards(build):
    frozen = build()
    samples = torch.randn(3, *frozen.input_shape)
    with torch.inference_mode():
        expected = frozen.prefix(frozen.num_cuts)(samples)
    before = {node: w.clone() for node, w in frozen.weights.items()}
    profile_region(frozen, CPU, batches=(1, 2))
    prefix_outputs(frozen, samples, range(frozen.num_cuts + 1))
    assert all(torch.equal(frozen.weights[n], w) for n, w in before.items())
    with torch.inference_mode():
        assert torch.equal(frozen.prefix(frozen.num_cuts)(samples), expected)


def test_long_budget_gives_each_batch_all_passes(monkeypatch):
    clock = Passes(monkeypatch, 0.001)
    profiled(small_region(), 1, 8, clock=clock)
    assert sorted(clock.batches) == [1] * MAX_PASSES + [8] * MAX_PASSES


def test_short_budget_gives_up_passes_before_batches(monkeypatch):
    clock = Passes(monkeypatch, 1.0)
    _, found = profiled(
        small_region(), 1, 2, 4, budget_seconds=12, clock=clock
    )
    assert found == [1, 2, 4]
    assert clock.batches[:3] == [1, 2, 4]
    assert 1 <= clock.batches.count(1) < MAX_PASSES
    assert clock.now <= 12


def test_shorter_budget_gives_up_batches_but_the_smallest(monkeypatch):
    frozen = small_region()
    clock = Passes(monkeypatch, 1.0)
    assert profiled(frozen, 1, 8, budget_seconds=5, clock=clock)[1] == [1]
    clock = Passes(monkeypatch, 100.0)
    assert profiled(frozen, 2, 8, budget_seconds=5, clock=clock)[1] == [2]
    assert clock.batches == [2]


def test_device_that_runs_out_of_memory_has_the_smaller_batches(monkeypatch):
    warm_up = profile._BatchRun.warm_up

    def crowded(run):
        if run.batch > limit:
            raise torch.OutOfMemoryError("no more")
        warm_up(run)

    monkeypatch.setattr(profile._BatchRun, "warm_up", crowded)
    limit = 2
    assert profiled(small_region(), 1, 2, 4, 8)[1] == [1, 2]
    limit = 0
    with pytest.raises(torch.OutOfMemoryError):
        profiled(small_region(), 1, 2)


@pytest.mark.parametrize("batches", [(0, 1), (-1,)])
def test_batches_below_one_are_refused(batches):
    with pytest.raises(ValueError, match="from 1 on"):
        profiled(small_region(), *batches)


@pytest.mark.parametrize("build", [small_region, branched_region, fast_region])
def test_outputs_are_those_of_each_prefix(build):
    frozen = build()
    samples = torch.randn(3, *frozen.input_shape)
    kept = samples.clone()
    found = prefix_outputs(frozen, samples, range(frozen.num_cuts + 1))
    assert found.keys() == set(range(frozen.num_cuts + 1))
    for cut, tensor in found.items():
        with torch.inference_mode():
            expected = frozen.prefix(cut)(samples)
        rtol = 1e-4 if frozen.is_fast else 0
        atol = rtol / 10 * expected.abs().max().item()
        torch.testing.assert_close(tensor, expected, rtol=rtol, atol=atol)
    assert torch.equal(samples, kept)


def test_outputs_of_some_cuts_need_no_more_than_the_last_of_them():
    frozen = small_region()
    samples = torch.randn(2, *frozen.input_shape)
    assert prefix_outputs(frozen, samples, []) == {}
    assert prefix_outputs(frozen, samples, [0])[0] is samples
    assert list(prefix_outputs(frozen, samples, [3, 1])) == [3, 1]
    with pytest.raises(UnsupportedError, match="is not one of"):
        prefix_outputs(frozen, samples, [frozen.num_cuts + 1])


def test_peak_bytes_are_those_of_each_prefix():
    for frozen in (small_region(), branched_region(), fast_region()):
        found = peak_bytes_by_cut(frozen, CPU)
        needs = [
            memory_requirement(frozen, c) for c in range(frozen.num_cuts + 1)
        ]
        assert list(found) == [each.peak_bytes(1) for each in needs]


@pytest.mark.parametrize(("allocated", "factor"), [(3.0, 3.0), (0.5, 1.0)])
def test_gpu_raises_the_modelled_peak_and_never_lowers_it(
    monkeypatch, allocated, factor
):
    frozen = small_region()
    weights = frozen.parameter_bytes
    working = [each - weights for each in peak_bytes_by_cut(frozen, CPU)]
    measured = Mock(return_value=round(allocated * working[-1]))
    monkeypatch.setattr(profile, "_allocated_bytes", measured)
    found = peak_bytes_by_cut(frozen, torch.device("cuda:0"))
    assert list(found) == [weights + round(factor * each) for each in working]


class FakeEvent:
    """CUDA events, in milliseconds, of a device that does nothing."""

    clock = itertools.count(0.0, 250.0)

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.at = next(self.clock)

    def elapsed_time(self, end):
        return end.at - self.at


def test_gpu_is_timed_by_its_events_once_it_has_settled(monkeypatch):
    settled = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", settled.append)
    device = torch.device("cuda:0")
    frozen = branched_region()
    walk = TimedWalk(
        frozen.prefix(frozen.num_cuts), timer_for(device, ticks())
    )
    with torch.inference_mode():
        seconds = walk.seconds(torch.randn(2, *frozen.input_shape))
    assert set(seconds) == {0.25}
    assert len(seconds) == 1 + len(frozen.program.calls)
    assert settled == [device]


def test_model_profile_travels_and_says_what_it_is_of():
    frozen = small_region()
    options = {
        "cores": 3.0,
        "memory_limit_bytes": 1 << 30,
        "load_seconds": 0.5,
    }
    found = profile_model(frozen, CPU, digest="d" * 64, **options)
    assert ModelProfile.from_body(found.to_body()) == found
    assert (found.digest, found.device, found.cores) == ("d" * 64, "cpu", 3)
    assert found.numerics_tag == numerics_tag("cpu")
    assert found.forward_threads == torch.get_num_threads()
    assert found.num_cuts == frozen.num_cuts
    assert found.parameter_bytes == frozen.parameter_bytes
    assert found.device_name
    assert found.reference_seconds > 0
    assert [each.batch for each in found.batches] == [1, 16]


def test_region_of_any_shape_has_a_profile_without_reference():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    frozen = split(model, "1", sample_shape=(7, 6)).frozen
    found = profile_model(frozen, CPU, cores=1, memory_limit_bytes=1 << 20)
    assert found.reference_seconds == 0.0
    assert found.num_cuts == frozen.num_cuts


def test_reference_image_is_of_a_photographs_size_and_always_the_same():
    image = reference_image()
    assert image == reference_image()
    assert 40_000 < len(image) < 200_000
    assert decode_image(image).shape == (3, HEIGHT, WIDTH)


def test_reference_seconds_are_a_median_of_one_thread():
    ticks = iter([0, 90, 100, 180, 200, 201, 300, 303, 400, 402, 500, 509])
    times = itertools.chain(ticks, [600, 604])
    threads = torch.get_num_threads()
    seen = []

    def clock():
        seen.append(torch.get_num_threads())
        return float(next(times))

    assert reference_seconds(ImageTransform(72, 64), clock=clock) == 3.0
    assert set(seen) == {1}
    assert torch.get_num_threads() == threads
