"""Baseline policies choose like the code of their authors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.suite.baseline_policies import (
    PolicyInputs,
    baseline_plans,
    hapi_2022,
    hapi_sc24,
)

from hapi_splitter.planner.plan import Option, Problem, Resource


def problem_of(
    sizes,
    link,
    *,
    server_seconds=1e-3,
    client_seconds=1e-3,
    raw_bytes=133_802,
    memory=1,
):
    """Builds a problem whose server work grows linearly with the cut."""
    last = max(sizes)
    options = [
        Option(
            0,
            "raw",
            {"link": raw_bytes, "client device": client_seconds},
            0,
            1,
        )
    ]
    for cut, size in sizes.items():
        use = {
            "link": float(size),
            "server device": server_seconds * cut / last,
            "client device": client_seconds * (1 - cut / last),
            "client cpu": 1e-4,
        }
        options.append(Option(cut, "float32", use, memory, 1))
    return Problem(
        resources=(
            Resource("link", link, "bytes/s"),
            Resource("server device", 1.0, "devices"),
            Resource("client device", 1.0, "devices"),
            Resource("client cpu", 1.0, "cores"),
        ),
        options=tuple(options),
        num_samples=50_000,
        epochs=1.0,
        push_one_off_seconds=0.0,
        server_limit_bytes=10,
        client_limit_bytes=10,
        last_cut=last,
    )


def facts_of(sizes, batch_size, parameter_bytes=0):
    last = max(sizes)
    sorted_sizes = {
        cut: sizes[min(c for c in sizes if c >= cut)]
        for cut in range(1, last + 1)
    }
    return PolicyInputs(
        batch_size=batch_size,
        raw_bytes=133_802,
        input_bytes=602_112,
        cut_bytes=sorted_sizes,
        parameter_bytes=parameter_bytes,
        unpack_seconds={(cut, "float32"): 1e-4 for cut in sizes},
    )


def cut_of(plan):
    ((option, weight),) = plan.mix
    assert weight == 1.0
    return option.cut


@pytest.mark.parametrize(
    ("megabit", "batch_size", "cut"),
    [
        (100, 2000, 17),
        (500, 2000, 13),
        (1000, 2000, 13),
        (1000, 8000, 17),
        (10_000, 2000, 13),
    ],
)
def test_2022_takes_the_first_cut_whose_batch_takes_a_second(
    megabit, batch_size, cut
):
    sizes = {3: 774_400, 6: 140_000, 13: 30_000, 17: 16_384}
    problem = problem_of(sizes, megabit * 1e6 / 8)
    plan = hapi_2022(problem, facts_of(sizes, batch_size))
    assert plan.rule == "hapi-2022"
    assert cut_of(plan) == cut


def test_2022_takes_the_last_cut_if_no_cut_is_small():
    sizes = {1: 800_000, 2: 400_000, 3: 401_408}
    problem = problem_of(sizes, 1e9)
    assert cut_of(hapi_2022(problem, facts_of(sizes, 64))) == 3


def test_2022_skips_cuts_that_save_no_memory():
    sizes = {1: 100_000, 2: 90_000, 3: 1_000}
    problem = problem_of(sizes, 1e9)
    # A second copy of the weights exceeds what a batch of one saves.
    facts = facts_of(sizes, 1, parameter_bytes=10**9)
    assert cut_of(hapi_2022(problem, facts)) == 3
    # (602,112 + 702,112) * 100 bytes, against 25 times that sum and
    # (100,000 + 190,000) * 100.
    assert cut_of(hapi_2022(problem, facts_of(sizes, 100))) == 1


def test_sc24_adds_the_stages_of_the_server():
    sizes = {1: 50_000, 2: 1_000}
    problem = problem_of(sizes, 5e6, server_seconds=8e-3, client_seconds=1e-3)
    facts = facts_of(sizes, 512)
    # At 1: 10 + 4 ms; at 2: 0.2 + 8 ms.
    assert cut_of(hapi_sc24(problem, facts)) == 2
    # At 1: 10 + 10 ms; at 2: 0.2 + 20 ms, which is more than the sum at 1.
    slower = problem_of(sizes, 5e6, server_seconds=20e-3)
    assert cut_of(hapi_sc24(slower, facts)) == 1
    # The best overlapped single cut would be 1 already at 10.5 ms.
    middle = problem_of(sizes, 5e6, server_seconds=15e-3)
    assert cut_of(hapi_sc24(middle, facts)) == 2


def test_sc24_streams_if_a_streamed_batch_is_faster():
    sizes = {1: 50_000, 2: 40_000}
    problem = problem_of(sizes, 1e9, server_seconds=1.0)
    assert cut_of(hapi_sc24(problem, facts_of(sizes, 512))) == 0


def test_sc24_skips_cuts_that_do_not_fit():
    sizes = {1: 50_000, 2: 1_000}
    problem = problem_of(sizes, 5e6)
    assert cut_of(hapi_sc24(problem, facts_of(sizes, 512))) == 2
    options = tuple(
        replace(o, server_bytes=99) if o.cut == 2 else o
        for o in problem.options
    )
    problem = replace(problem, options=options)
    assert cut_of(hapi_sc24(problem, facts_of(sizes, 512))) == 1


def test_sc24_does_not_overlap_unpacking():
    sizes = {1: 2_000, 2: 1_000}
    problem = problem_of(sizes, 1e6, server_seconds=1e-5)
    facts = facts_of(sizes, 512)
    assert cut_of(hapi_sc24(problem, facts)) == 2
    slow = {(1, "float32"): 1e-5, (2, "float32"): 1e-2}
    costly = replace(facts, unpack_seconds=slow)
    assert cut_of(hapi_sc24(problem, costly)) == 1


def test_policy_that_does_not_fit_is_omitted():
    sizes = {6: 140_000, 17: 16_384}
    problem = problem_of(sizes, 20e6, memory=99)
    assert "hapi-2022" not in baseline_plans(problem, facts_of(sizes, 256))
    with pytest.raises(ValueError, match="lack of memory"):
        hapi_2022(problem, facts_of(sizes, 256))


def test_sc24_counts_layers_once_on_a_server_without_accelerator():
    sizes = {1: 100_000, 2: 1_000}
    facts = facts_of(sizes, 512)
    both = replace(facts, server_device="cpu")
    assert facts.server_stages == ("server device", "server cpu", "link")
    assert both.server_stages == ("server cpu", "link")
    problem = problem_of(sizes, 1e9)
    slower = replace(
        problem,
        options=tuple(
            replace(
                option,
                use={
                    **option.use,
                    "server device": 0.02 * bool(option.cut),
                    "server cpu": 0.02 * bool(option.cut),
                    "client device": 0.0 if option.cut else 0.03,
                },
            )
            for option in problem.options
        ),
        resources=(
            Resource("link", 1e9, "bytes/s"),
            Resource("server cpu", 1.0, "cores"),
            Resource("server device", 1.0, "devices"),
            Resource("client cpu", 1.0, "cores"),
            Resource("client device", 1.0, "devices"),
        ),
    )
    assert cut_of(hapi_sc24(slower, facts)) == 0
    assert cut_of(hapi_sc24(slower, both)) != 0
