"""How others would choose: for comparison, never for work.

Each rule chooses a *cut*. It gets the same candidates, the same encodings
(the fastest for its cut) and the same layers after the freeze point as
``auto``, all of which the published systems lack, and is judged by the same
model of costs. So a difference shows the choice alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hapi_protocol.profiles import ModelProfile
from hapi_splitter.planner.costs import CutFacts, SampleCosts
from hapi_splitter.planner.plan import (
    LINK,
    Option,
    Plan,
    Problem,
    freeze,
    solve,
    static,
    static_at,
    stream,
)
from hapi_splitter.planner.problem import (
    CLIENT_CPU,
    CLIENT_DEVICE,
    SERVER_CPU,
    SERVER_DEVICE,
)

HAPI_SERVER_BATCH = 25
"""Smallest batch of the 2022 prototype's worker, with which it reckons."""
_HAPI_WAVE = 512
"""Samples that one wave of requests of the 2024 prototype brings."""

RULES = ("auto", "stream", "freeze", "static", "hapi-2022", "hapi-sc24")


@dataclass(frozen=True)
class RuleFacts:
    """What the published rules look at and the problem does not say.

    Attributes:
        batch_size: of the training loop.
        raw_bytes: of an average image.
        input_bytes: of a decoded sample.
        cut_bytes: of one sample at each cut, float32, by cut.
        parameter_bytes: of the frozen region.
        unpack_seconds: core-seconds per sample by cut and encoding.
        server_device: kind of the worker's, ``cpu`` or ``cuda``.
    """

    batch_size: int
    raw_bytes: float
    input_bytes: int
    cut_bytes: Mapping[int, int]
    parameter_bytes: int
    unpack_seconds: Mapping[tuple[int, str], float]
    server_device: str = ""

    @property
    def server_stages(self) -> tuple[str, ...]:
        """Whose seconds follow one another in the prototype's server.

        Without an accelerator the seconds of its cores hold the layers.
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
    ) -> RuleFacts:
        """From the arguments of :func:`costs.build_problem`."""
        return cls(
            batch_size=batch_size,
            raw_bytes=samples.raw_bytes,
            input_bytes=input_bytes,
            cut_bytes={cut.index: cut.float32_bytes for cut in cuts},
            parameter_bytes=server.parameter_bytes,
            unpack_seconds=samples.unpack_seconds,
            server_device=server.device,
        )


def alternatives(problem: Problem, facts: RuleFacts) -> dict[str, Plan]:
    """All rules in the order of :data:`RULES`, as far as they are possible.

    A rule whose choice does not fit into memory is missing.
    """
    rules: dict[str, Callable[[], Plan]] = {
        "auto": lambda: solve(problem),
        "stream": lambda: stream(problem),
        "freeze": lambda: freeze(problem),
        "static": lambda: static(problem),
        "hapi-2022": lambda: hapi_2022(problem, facts),
        "hapi-sc24": lambda: hapi_sc24(problem, facts),
    }
    fitting = {
        option.cut for option in problem.options if problem.fits(option)
    }
    needed = {
        "stream": 0,
        "freeze": problem.last_cut,
        "hapi-2022": _cut_2022(problem, facts),
        "hapi-sc24": _cut_sc24(problem, facts),
    }
    return {
        name: rules[name]()
        for name in RULES
        if name not in needed or needed[name] in fitting
    }


def hapi_2022(problem: Problem, facts: RuleFacts) -> Plan:
    """The rule of the HAPI prototype of December 2021 to 2022.

    With batch size B, ``D(i)`` float32 bytes of a sample at cut i, and the
    last cut f:

    * candidates are ``i <= f`` with ``D(i) * B < min(S * B, link * 1 s)``;
      ``S``, a constant there (133,802 bytes, "the average JPEG"), is the
      measured average here;
    * the first candidate with ``M_server(i) + M_client(i) < M_vanilla``
      wins, where with ``pair(a..b)`` as the largest sum of two neighbouring
      outputs and the server's batch b0 = 25:
      ``M_server = (input + pair(0..i)) * b0 + weights``,
      ``M_client = (D(i) + pair(i..f)) * B + weights``,
      ``M_vanilla = (input + pair(0..f)) * B + weights`` (the tail is on
      both sides and left out);
    * if none does, the last candidate; if there is no candidate, f.

    It considers no time of computing, and never streams.

    Raises:
        ValueError: its cut does not fit.
    """
    cut = _cut_2022(problem, facts)
    return replace(static_at(problem, cut), rule="hapi-2022")


def hapi_sc24(problem: Problem, facts: RuleFacts) -> Plan:
    """The rule of HAPI's SoCC'24 prototype, constants fitted to our costs.

    ``T(i) = stream(i) + (N - 1) * (max(stream(i), client(i)) + np(i))
    + np(i) + client(i)`` for N batches to come, with

    * ``stream(i) = W * S(i)``, W waves of 512 samples (one if the batch is
      smaller): the *sum* of the server's forward, of its serialising, and of
      sending, as a request there does one after the other;
    * ``client(i)``: loading to the device, remaining layers, backward;
    * ``np(i)``: unpickling, which nothing overlaps.

    What became of the constants, all fitted to one pair of machines there:
    per-layer times of server and client are our profiles' device-seconds;
    ``k * n`` and 0.90 ns a byte (serialising, shared memory), ``t_pyt``,
    ``t_h2d`` and ``t_np`` are our core-seconds on the server (reading,
    decoding, encoding); 0.37 ns a byte and ``t_bwd`` on the client are our
    core-seconds there but for unpacking, as far as they exceed the device's;
    0.93 ns a byte of ``np`` is our unpacking; ``t_shm`` and ``t_model``
    (attaching memory, loading the model for each request) are 0, as our
    worker keeps its models; bandwidth, per flow there, is the link's.

    The cut with the least ``T`` that fits wins; none: the last. If a batch
    of streaming takes less than ``T / N``, it streams.

    Raises:
        ValueError: its cut does not fit.
    """
    cut = _cut_sc24(problem, facts)
    return replace(static_at(problem, cut), rule="hapi-sc24")


def _pushed_cuts(problem: Problem) -> list[int]:
    return sorted({option.cut for option in problem.options} - {0})


def _cut_2022(problem: Problem, facts: RuleFacts) -> int:
    sizes = facts.cut_bytes
    batch = facts.batch_size
    most = min(facts.raw_bytes * batch, problem.capacity(LINK) * 1.0)
    candidates = [
        cut for cut in _pushed_cuts(problem) if sizes[cut] * batch < most
    ]
    if not candidates:
        return problem.last_cut
    for cut in candidates:
        if _split_memory(problem, facts, cut) < _whole_memory(problem, facts):
            return cut
    return candidates[-1]


def _split_memory(problem: Problem, facts: RuleFacts, cut: int) -> int:
    server = facts.input_bytes + _pair(facts, 0, cut)
    client = facts.cut_bytes[cut] + _pair(facts, cut, problem.last_cut)
    return (
        server * HAPI_SERVER_BATCH
        + client * facts.batch_size
        + 2 * facts.parameter_bytes
    )


def _whole_memory(problem: Problem, facts: RuleFacts) -> int:
    whole = facts.input_bytes + _pair(facts, 0, problem.last_cut)
    return whole * facts.batch_size + facts.parameter_bytes


def _pair(facts: RuleFacts, start: int, stop: int) -> int:
    """Largest sum of two neighbours from a cut to a cut; 0 is the input."""
    sizes = [facts.input_bytes if start == 0 else facts.cut_bytes[start]]
    sizes += [facts.cut_bytes[cut] for cut in range(start + 1, stop + 1)]
    return max((a + b for a, b in pairwise(sizes)), default=0)


def _cut_sc24(problem: Problem, facts: RuleFacts) -> int:
    batches = max(1, math.ceil(problem.samples_to_come / facts.batch_size))
    totals = []
    for cut in _pushed_cuts(problem):
        offered = [o for o in problem.options if o.cut == cut]
        if any(problem.fits(option) for option in offered):
            option = static_at(problem, cut).mix[0][0]
            totals.append((_total(problem, facts, option, batches), cut))
    if not totals:
        return problem.last_cut
    total, cut = min(totals)
    vanilla = next(option for option in problem.options if option.cut == 0)
    if problem.fits(vanilla):
        rate = problem.samples_per_second(vanilla)
        if rate and batches * facts.batch_size / rate < total:
            return 0
    return cut


def _total(
    problem: Problem, facts: RuleFacts, option: Option, batches: int
) -> float:
    """``T(i)`` of :func:`hapi_sc24`."""
    batch = facts.batch_size
    waves = math.ceil(batch / _HAPI_WAVE)
    unpack = problem.seconds_for(
        facts.unpack_seconds[option.cut, option.encoding], CLIENT_CPU
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
