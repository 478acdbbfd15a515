"""Baseline policies for comparison with the planner; never used by jobs.

Each policy chooses a *cut*. It has the same candidates, encodings (the fastest
for its cut) and layers after the freeze point as ``auto``, all of which the
published systems lack, and the same cost model. So a difference in speed is
due to the choice alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hapi_protocol.profiles import ModelProfile
from hapi_splitter.planner.costs import CutFacts, SampleCosts
from hapi_splitter.planner.plan import (
    LINK,
    Option,
    Plan,
    Problem,
    static_at,
)
from hapi_splitter.planner.problem import (
    CLIENT_CPU,
    CLIENT_DEVICE,
    SERVER_CPU,
    SERVER_DEVICE,
    Route,
)

HAPI_SERVER_BATCH = 25
"""Batch size in the memory estimate of the 2022 prototype's worker."""
_HAPI_WAVE_SAMPLES = 512
"""Samples in one wave of requests of the 2024 prototype."""


@dataclass(frozen=True)
class PolicyInputs:
    """Inputs of the published policies that the problem does not contain.

    Attributes:
        batch_size: of the training loop.
        raw_bytes: of an average stored image.
        input_bytes: of a decoded sample.
        cut_bytes: float32 bytes of one sample's features, by cut.
        parameter_bytes: of the frozen region.
        unpack_seconds: core-seconds per sample, by cut and encoding.
        server_device: device kind of the worker, ``cpu`` or ``cuda``.
    """

    batch_size: int
    raw_bytes: float
    input_bytes: int
    cut_bytes: Mapping[int, int]
    parameter_bytes: int
    unpack_seconds: Mapping[Route, float]
    server_device: str = ""

    @property
    def server_stages(self) -> tuple[str, ...]:
        """Resources that the prototype's server uses one after another.

        Without an accelerator the CPU's seconds include the layers.
        """
        if self.server_device == "cpu":
            return SERVER_CPU, LINK
        return SERVER_DEVICE, SERVER_CPU, LINK

    @classmethod
    def of(
        cls,
        cuts: Sequence[CutFacts],
        server: ModelProfile,
        samples: SampleCosts,
        *,
        batch_size: int,
        input_bytes: int,
    ) -> PolicyInputs:
        """Takes the arguments of
        :func:`hapi_splitter.planner.costs.build_problem`."""
        return cls(
            batch_size=batch_size,
            raw_bytes=samples.raw_bytes,
            input_bytes=input_bytes,
            cut_bytes={cut.index: cut.float32_bytes for cut in cuts},
            parameter_bytes=server.parameter_bytes,
            unpack_seconds=samples.unpack_seconds,
            server_device=server.device,
        )


def baseline_plans(problem: Problem, facts: PolicyInputs) -> dict[str, Plan]:
    """Returns the plans of both prototypes, by their names.

    A policy whose choice does not fit into memory is omitted.
    """
    fitting = {
        option.cut for option in problem.options if problem.fits(option)
    }
    plans = {}
    if _cut_2022(problem, facts) in fitting:
        plans["hapi-2022"] = hapi_2022(problem, facts)
    if _cut_sc24(problem, facts) in fitting:
        plans["hapi-sc24"] = hapi_sc24(problem, facts)
    return plans


def hapi_2022(problem: Problem, facts: PolicyInputs) -> Plan:
    """Chooses like the HAPI prototype of December 2021 to 2022.

    With batch size B, ``D(i)`` float32 bytes of a sample at cut i, and the
    last cut f:

    * candidates are ``i <= f`` with ``D(i) * B < min(S * B, link * 1 s)``;
      ``S``, a constant in the prototype (133,802 bytes, "the average JPEG"),
      is the measured average here;
    * the first candidate with ``M_server(i) + M_client(i) < M_vanilla`` is
      chosen. With ``pair(a..b)``, the largest sum of two neighbouring outputs,
      and the server's batch b0 = 25:
      ``M_server = (input + pair(0..i)) * b0 + weights``,
      ``M_client = (D(i) + pair(i..f)) * B + weights``,
      ``M_vanilla = (input + pair(0..f)) * B + weights`` (the tail is on both
      sides and omitted);
    * without such a candidate, the last one; without any candidate, f.

    It ignores compute time and never streams.

    Raises:
        ValueError: if its cut does not fit into memory.
    """
    cut = _cut_2022(problem, facts)
    return replace(static_at(problem, cut), rule="hapi-2022")


def hapi_sc24(problem: Problem, facts: PolicyInputs) -> Plan:
    """Chooses like HAPI's SoCC'24 prototype, with our measured costs.

    ``T(i) = stream(i) + (N - 1) * (max(stream(i), client(i)) + np(i))
    + np(i) + client(i)`` for N remaining batches, with

    * ``stream(i) = W * S(i)``, W waves of 512 samples (one if the batch is
      smaller): the *sum* of the server's forward pass, serialisation and
      sending, which run one after another in the prototype;
    * ``client(i)``: loading to the device, remaining layers, backward pass;
    * ``np(i)``: unpickling, which does not overlap with anything.

    The prototype's constants were fitted to two machines. Here per-layer times
    are device-seconds of our profiles; ``k * n`` and 0.90 ns per byte
    (serialisation, shared memory), ``t_pyt``, ``t_h2d`` and ``t_np`` are
    core-seconds of our server (reading, decoding, encoding); 0.37 ns per byte
    and ``t_bwd`` on the client are core-seconds of our client without
    unpacking, if they exceed the device's; 0.93 ns per byte of ``np`` is our
    unpacking; ``t_shm`` and ``t_model`` (attaching memory, loading the model
    per request) are 0, as our worker keeps models loaded; the bandwidth, per
    flow in the prototype, is the link's.

    It chooses the cut with the smallest ``T`` that fits, or else the last. If
    a streamed batch takes less than ``T / N``, it streams.

    Raises:
        ValueError: if its cut does not fit into memory.
    """
    cut = _cut_sc24(problem, facts)
    return replace(static_at(problem, cut), rule="hapi-sc24")


def _pushed_cuts(problem: Problem) -> list[int]:
    return sorted({option.cut for option in problem.options} - {0})


def _cut_2022(problem: Problem, facts: PolicyInputs) -> int:
    sizes = facts.cut_bytes
    batch = facts.batch_size
    max_bytes = min(facts.raw_bytes * batch, problem.capacity(LINK) * 1.0)
    candidates = [
        cut for cut in _pushed_cuts(problem) if sizes[cut] * batch < max_bytes
    ]
    if not candidates:
        return problem.last_cut
    for cut in candidates:
        memory = _split_memory_bytes(problem, facts, cut)
        if memory < _vanilla_memory_bytes(problem, facts):
            return cut
    return candidates[-1]


def _split_memory_bytes(
    problem: Problem, facts: PolicyInputs, cut: int
) -> int:
    server = facts.input_bytes + _largest_two(facts, 0, cut)
    client = facts.cut_bytes[cut] + _largest_two(facts, cut, problem.last_cut)
    return (
        server * HAPI_SERVER_BATCH
        + client * facts.batch_size
        + 2 * facts.parameter_bytes
    )


def _vanilla_memory_bytes(problem: Problem, facts: PolicyInputs) -> int:
    sample = facts.input_bytes + _largest_two(facts, 0, problem.last_cut)
    return sample * facts.batch_size + facts.parameter_bytes


def _largest_two(facts: PolicyInputs, start: int, stop: int) -> int:
    """Returns the largest sum of two neighbours from a cut (0: input)."""
    sizes = [facts.input_bytes if start == 0 else facts.cut_bytes[start]]
    sizes += [facts.cut_bytes[cut] for cut in range(start + 1, stop + 1)]
    return max((a + b for a, b in pairwise(sizes)), default=0)


def _cut_sc24(problem: Problem, facts: PolicyInputs) -> int:
    batches = max(1, math.ceil(problem.remaining_samples / facts.batch_size))
    totals = []
    for cut in _pushed_cuts(problem):
        options = [o for o in problem.options if o.cut == cut]
        if any(problem.fits(option) for option in options):
            option = static_at(problem, cut).mix[0][0]
            seconds = _sc24_seconds(problem, facts, option, batches)
            totals.append((seconds, cut))
    if not totals:
        return problem.last_cut
    total, cut = min(totals)
    vanilla = next(option for option in problem.options if option.cut == 0)
    if problem.fits(vanilla):
        rate = problem.samples_per_second(vanilla)
        if rate and batches * facts.batch_size / rate < total:
            return 0
    return cut


def _sc24_seconds(
    problem: Problem, facts: PolicyInputs, option: Option, batches: int
) -> float:
    """Computes ``T(i)`` of :func:`hapi_sc24`."""
    batch = facts.batch_size
    waves = math.ceil(batch / _HAPI_WAVE_SAMPLES)
    unpack = problem.seconds_for(
        facts.unpack_seconds[option.route], CLIENT_CPU
    )
    one_wave = (batch / waves) * sum(
        problem.seconds(option, name) for name in facts.server_stages
    )
    streaming = waves * one_wave
    client = batch * max(
        problem.seconds(option, CLIENT_DEVICE),
        problem.seconds(option, CLIENT_CPU) - unpack,
    )
    return (
        streaming
        + (batches - 1) * (max(streaming, client) + batch * unpack)
        + batch * unpack
        + client
    )
