"""Baseline policies choose like the code of their authors."""

from dataclasses import replace

import pytest
from benchmarks.suite.baseline_policies import (
    PolicyInputs,
    baseline_plans,
    hapi_2022,
    hapi_sc24,
)

from hapi_splitter.planner.plan import Option, Problem, Resource

REST = ("server device", "client device", "client cpu")


def problem_of(
    sizes, link, *, server_seconds=1e-3, client_seconds=1e-3, memory=1
):
    """Builds a problem whose server work grows linearly with the cut."""
    last = max(sizes)
    raw = {"link": 133_802, "client device": client_seconds}
    options = [Option(0, "raw", raw, 0, 1)]
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
            *(Resource(each, 1.0, "") for each in REST),
        ),
        options=tuple(options),
        num_samples=50_000,
        epochs=1.0,
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


FOUR = {3: 774_400, 6: 140_000, 13: 30_000, 17: 16_384}
LARGE = {1: 800_000, 2: 400_000, 3: 401_408}
SAVES = {1: 100_000, 2: 90_000, 3: 1_000}


@pytest.mark.parametrize(
    ("sizes", "link", "batch_size", "parameter_bytes", "cut"),
    [
        # The first cut whose batch takes a second.
        (FOUR, 100e6 / 8, 2000, 0, 17),
        (FOUR, 500e6 / 8, 2000, 0, 13),
        (FOUR, 1000e6 / 8, 2000, 0, 13),
        (FOUR, 1000e6 / 8, 8000, 0, 17),
        (FOUR, 10_000e6 / 8, 2000, 0, 13),
        # The last one if no cut is small.
        (LARGE, 1e9, 64, 0, 3),
        # A second copy of the weights exceeds what a batch of one saves.
        (SAVES, 1e9, 1, 10**9, 3),
        # (602,112 + 702,112) * 100 bytes, against 25 times that sum and
        # (100,000 + 190,000) * 100.
        (SAVES, 1e9, 100, 0, 1),
    ],
)
def test_2022_takes_the_first_small_cut_that_saves_memory(
    sizes, link, batch_size, parameter_bytes, cut
):
    facts = facts_of(sizes, batch_size, parameter_bytes)
    plan = hapi_2022(problem_of(sizes, link), facts)
    assert (plan.rule, cut_of(plan)) == ("hapi-2022", cut)


@pytest.mark.parametrize(
    ("sizes", "link", "server_seconds", "cut"),
    [
        # The stages of the server add up.  At 1: 10 + 4 ms; at 2: 0.2 + 8.
        ({1: 50_000, 2: 1_000}, 5e6, 8e-3, 2),
        # At 1: 10 + 10 ms; at 2: 0.2 + 20 ms, more than the sum at 1.
        ({1: 50_000, 2: 1_000}, 5e6, 20e-3, 1),
        # The best overlapped single cut would be 1 already at 10.5 ms.
        ({1: 50_000, 2: 1_000}, 5e6, 15e-3, 2),
        # A streamed batch is faster.
        ({1: 50_000, 2: 40_000}, 1e9, 1.0, 0),
    ],
)
def test_sc24_adds_the_stages_of_the_server(sizes, link, server_seconds, cut):
    problem = problem_of(sizes, link, server_seconds=server_seconds)
    assert cut_of(hapi_sc24(problem, facts_of(sizes, 512))) == cut


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
            *(Resource(each, 1.0, "") for each in (*REST, "server cpu")),
        ),
    )
    assert cut_of(hapi_sc24(slower, facts)) == 0
    assert cut_of(hapi_sc24(slower, both)) != 0
