"""The planner: properties of its optimum, and hand-computed cases."""

import math
from dataclasses import replace
from itertools import combinations, pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hapi_splitter.planner.plan import (
    Option,
    Problem,
    Resource,
    compare_precisions,
    crossover_bandwidth,
    evaluate,
    freeze,
    solve,
    static,
    static_at,
    stream,
)
from hapi_splitter.planner.problem import (
    RESOURCES,
    UNITS,
    UNSEEN_LINK,
    StartupCost,
)

CLOSE = 1e-5
"""Relative tolerance, twenty times the cost of a tie."""

amounts = st.floats(-3, 3).map(lambda exponent: 10**exponent)
ENCODINGS = ("float32", "float16", "uint8;zstd")


def startup_of(seconds):
    return StartupCost(load_seconds=seconds)


@st.composite
def problems(draw):
    names = [
        "link",
        *draw(st.lists(st.sampled_from(RESOURCES[1:]), unique=True)),
    ]
    resources = tuple(
        Resource(name, draw(amounts), UNITS[name]) for name in names
    )
    keys = draw(
        st.lists(
            st.tuples(st.integers(1, 9), st.sampled_from(ENCODINGS)),
            unique=True,
            max_size=7,
        )
    )
    options = []
    for cut, encoding in [(0, "raw"), *keys]:
        use = {name: draw(st.just(0.0) | amounts) for name in names}
        use["link"] = draw(amounts)
        memory = draw(st.integers(0, 12)) if cut else 0
        client = draw(st.integers(0, 12)) if cut else 0
        options.append(Option(cut, encoding, use, memory, client))
    return Problem(
        resources=resources,
        options=tuple(options),
        num_samples=draw(st.integers(0, 10**6)),
        epochs=draw(st.floats(0, 50)),
        startup=startup_of(draw(st.just(0.0) | amounts)),
        server_limit_bytes=10,
        client_limit_bytes=10,
        last_cut=9,
    )


def without_startup_cost(problem):
    """Removes startup costs; some samples remain."""
    return replace(
        problem, startup=StartupCost(), num_samples=1000, epochs=1.0
    )


def scaled(problem, name, factor):
    """Multiplies the capacity of a resource."""
    resources = tuple(
        replace(r, capacity=r.capacity * factor) if r.name == name else r
        for r in problem.resources
    )
    return replace(problem, resources=resources)


def solve_fast(problem):
    """Runs ``solve`` without the search of the crossover bandwidth."""
    with patch(
        "hapi_splitter.planner.plan.crossover_bandwidth", return_value=None
    ):
        return solve(problem)


def weights_of(plan):
    return {option.label: weight for option, weight in plan.mix}


def vertices(problem):
    """Yields samples per second at each vertex of the feasible region.

    A vertex is a non-negative solution for as many columns, of options and
    slack variables, as there are resources.
    """
    fitting = [option for option in problem.options if problem.fits(option)]
    usage = np.array(
        [
            [problem.seconds(option, r.name) for option in fitting]
            for r in problem.resources
        ]
    )
    size = len(problem.resources)
    columns = np.hstack([usage, np.eye(size)])
    for chosen in combinations(range(columns.shape[1]), size):
        basis = columns[:, chosen]
        if np.linalg.cond(basis) > 1e10:
            continue
        solution = np.linalg.solve(basis, np.ones(size))
        if solution.min() < -1e-9 * np.abs(solution).max():
            continue
        yield sum(
            x
            for x, c in zip(solution, chosen, strict=True)
            if c < len(fitting)
        )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems())
def test_plan_is_as_fast_as_the_best_vertex(problem):
    problem = without_startup_cost(problem)
    plan = solve_fast(problem)
    best = max(vertices(problem))
    assert plan.samples_per_second == pytest.approx(best, rel=CLOSE)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problems())
def test_no_named_plan_is_faster(problem):
    total = solve_fast(problem).total_seconds
    assert total <= stream(problem).total_seconds * (1 + CLOSE)
    assert total <= static(problem).total_seconds * (1 + CLOSE)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problems())
def test_plan_is_feasible_and_its_weights_sum_to_one(problem):
    plan = solve_fast(problem)
    assert sum(weight for _, weight in plan.mix) == pytest.approx(1)
    assert all(weight > 0 for _, weight in plan.mix)
    assert len(plan.mix) <= len(problem.resources)
    assert plan.binding
    for resource in problem.resources:
        used = plan.samples_per_second * sum(
            weight * option.use.get(resource.name, 0)
            for option, weight in plan.mix
        )
        assert used <= resource.capacity * (1 + 1e-9)
        assert plan.utilisation[resource.name] == pytest.approx(
            used / resource.capacity
        )
    for option, _ in plan.mix:
        assert option.server_bytes <= problem.server_limit_bytes
        assert option.client_bytes <= problem.client_limit_bytes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    problems(),
    st.sampled_from(RESOURCES),
    st.integers(-60, 60).map(lambda exponent: 2.0**exponent),
)
def test_plan_does_not_depend_on_the_unit_of_a_resource(problem, name, unit):
    options = tuple(
        replace(option, use=option.use | {name: option.use[name] * unit})
        if name in option.use
        else option
        for option in problem.options
    )
    other = replace(scaled(problem, name, unit), options=options)
    assert weights_of(solve_fast(other)) == weights_of(solve_fast(problem))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems(), st.floats(-12, 12).map(lambda exponent: 10**exponent))
def test_plan_does_not_depend_on_the_unit_of_time(problem, unit):
    other = replace(
        problem,
        resources=tuple(
            replace(r, capacity=r.capacity / unit) for r in problem.resources
        ),
        startup=startup_of(problem.push_one_off_seconds * unit),
    )
    assert solve_fast(other).total_seconds == pytest.approx(
        solve_fast(problem).total_seconds * unit, rel=CLOSE
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems(), st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_the_order_of_options(problem, rng):
    options, resources = list(problem.options), list(problem.resources)
    rng.shuffle(options)
    rng.shuffle(resources)
    other = replace(
        problem, options=tuple(options), resources=tuple(resources)
    )
    actual, expected = solve_fast(other), solve_fast(problem)
    assert actual.mix == expected.mix
    assert set(actual.binding) == set(expected.binding)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems(), st.lists(amounts, min_size=2, max_size=4))
def test_higher_startup_cost_never_helps(problem, costs):
    plans = [
        solve_fast(replace(problem, startup=startup_of(cost)))
        for cost in sorted(costs)
    ]
    for cheap, dear in pairwise(plans):
        slack = 1 + CLOSE
        assert cheap.total_seconds <= dear.total_seconds * slack
        assert cheap.pushes or not dear.pushes
        if cheap.pays_from_samples is None:
            assert dear.pays_from_samples is None
        else:
            assert dear.pays_from_samples is not None
            assert cheap.pays_from_samples <= dear.pays_from_samples


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problems())
def test_push_down_is_chosen_from_the_break_even_samples(problem):
    plan = solve_fast(problem)
    if plan.pays_from_samples is None:
        assert not plan.pushes
    elif problem.remaining_samples > plan.pays_from_samples * (1 + CLOSE):
        assert plan.pushes
    elif problem.remaining_samples < plan.pays_from_samples * (1 - CLOSE):
        assert not plan.pushes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems())
def test_choice_changes_at_the_crossover_bandwidth(problem):
    plan = solve(problem)
    crossover = crossover_bandwidth(problem, plan)
    if crossover is None:
        return
    faster = crossover > problem.capacity("link")
    for factor, same in ((1.01, False), (0.99, True)):
        link = crossover * (factor if faster else 1 / factor)
        changed = problem.with_bandwidth(link)
        if is_decisive(changed):
            assert (solve(changed).pushes == plan.pushes) is same


def is_decisive(problem):
    """Returns True if push-down and streaming differ by more than a tie."""
    best = solve(replace(problem, startup=StartupCost()))
    remaining = problem.remaining_samples
    if not best.pushes or not remaining:
        return False
    seconds = (
        problem.push_one_off_seconds + remaining / best.samples_per_second
    )
    ratio = seconds / stream(problem).total_seconds
    return abs(ratio - 1) > 1e-4


def case(
    link=100.0,
    server=1.0,
    client=1.0,
    startup=0.0,
    num_samples=1000,
    cuts=None,
):
    """Builds a problem in which the client alone computes 10 samples/s and
    the server alone 20."""
    pushed = cuts or {(3, "float16"): {"link": 1.0, "server device": 0.05}}
    return Problem(
        resources=(
            Resource("link", link, "bytes/s"),
            Resource("server device", server, "devices"),
            Resource("client device", client, "devices"),
        ),
        options=(
            Option(0, "raw", {"link": 1.0, "client device": 0.1}, 0, 5),
            *(Option(*key, use, 5, 5) for key, use in pushed.items()),
        ),
        num_samples=num_samples,
        epochs=1.0,
        startup=startup_of(startup),
        server_limit_bytes=10,
        client_limit_bytes=10,
        last_cut=max(cut for cut, _ in pushed),
    )


def test_rates_of_both_tiers_add_up_on_a_wide_link():
    plan = solve(case())
    assert plan.samples_per_second == pytest.approx(30, rel=CLOSE)
    assert weights_of(plan) == pytest.approx(
        {"stream": 1 / 3, "cut 3 · float16": 2 / 3}, rel=1e-3
    )
    assert plan.binding == ("server device", "client device")
    assert plan.total_seconds == pytest.approx(1000 / 30, rel=CLOSE)
    assert plan.pays_from_samples == 0
    assert plan.utilisation["link"] == pytest.approx(0.3, rel=CLOSE)


SMALL = {(3, "float16"): {"link": 0.1, "server device": 0.05}}
SLOW_SERVER = {(3, "float16"): {"link": 0.1, "server device": 0.2}}


@pytest.mark.parametrize(
    ("problem", "label", "rate", "pays_from"),
    [
        (case(link=5.0), "stream", 5, None),
        (case(link=1.0, cuts=SMALL), "cut 3 · float16", 10, 0),
    ],
    ids=["no smaller features", "smaller features"],
)
def test_link_that_limits_decides(problem, label, rate, pays_from):
    plan = solve(problem)
    assert weights_of(plan) == {label: 1.0}
    assert plan.binding == ("link",)
    assert plan.samples_per_second == pytest.approx(rate)
    assert plan.pays_from_samples == pays_from


LINK_OR_SERVER = {
    (1, "float32"): {"link": 0.8, "server device": 0.01},
    (2, "float32"): {"link": 0.2, "server device": 0.1},
}


@pytest.mark.parametrize("share", [0.0, 1e-12])
def test_plan_streams_without_a_server(share):
    plan = solve(case(server=share))
    assert plan.samples_per_second == pytest.approx(10, rel=CLOSE)
    assert weights_of(plan).get("stream", 0) == pytest.approx(1, abs=1e-6)


def test_plan_streams_below_the_break_even_samples():
    problem = case(startup=60.0, num_samples=800)
    plan = solve(problem)
    assert weights_of(plan) == {"stream": 1.0}
    assert plan.one_off_seconds == 0
    # 60 s / (1/10 s - 1/30 s)
    assert plan.pays_from_samples == pytest.approx(900, rel=1e-4)
    assert any("only from 900 samples" in each for each in plan.reasons)
    cheap = solve(replace(problem, startup=startup_of(0.1)))
    assert cheap.pays_from_samples == pytest.approx(1.5, rel=1e-4)
    assert any("pays off from 2 samples" in each for each in cheap.reasons)
    more = solve(replace(problem, epochs=2.0))
    assert more.pushes
    assert more.total_seconds == pytest.approx(60 + 1600 / 30, rel=CLOSE)


def test_ties_prefer_streaming_then_the_first_cut():
    same = {"link": 1.0, "client device": 0.1}
    cuts = {(2, "float32"): same, (1, "float32"): dict(same)}
    assert weights_of(solve(case(cuts=cuts))) == {"stream": 1.0}
    better = {"link": 1.0, "client device": 0.05}
    cuts = {(2, "float32"): better, (1, "float32"): dict(better)}
    assert weights_of(solve(case(cuts=cuts))) == {"cut 1 · float32": 1.0}


def test_ties_prefer_exact_encodings_and_few_options():
    use = {"link": 1.0, "server device": 0.05}
    encodings = ("uint8", "float32;lz4", "bfloat16", "float32")
    problem = case(cuts={(3, encoding): use for encoding in encodings})
    assert set(weights_of(solve(problem))) == {"stream", "cut 3 · float32"}
    assert weights_of(freeze(problem)) == {"cut 3 · float32": 1.0}
    problem = case(cuts={(cut, "float32"): use for cut in (1, 2, 3, 4)})
    assert set(weights_of(solve(problem))) == {"stream", "cut 1 · float32"}


def test_tie_adds_no_negligible_streaming():
    problem = case(link=5.0, cuts=LINK_OR_SERVER)
    image, *pushed = problem.options
    # Slightly worse than a mix of the cuts, within the tolerance of a tie.
    image = replace(image, use={"link": 0.4545, "server device": 0.063125})
    plan = solve(replace(problem, options=(image, *pushed)))
    assert {option.cut for option, _ in plan.mix} == {1, 2}


def test_cut_that_does_not_fit_is_excluded_and_named():
    problem = case()
    streamed, pushed = problem.options
    options = (streamed, replace(pushed, server_bytes=11))
    problem = replace(problem, options=options)
    plan = solve(problem)
    assert weights_of(plan) == {"stream": 1.0}
    assert any(
        "cut 3" in each and "11 B of the server's 10 B" in each
        for each in plan.reasons
    )
    with pytest.raises(ValueError, match="lack of memory"):
        freeze(problem)


def test_push_down_pays_at_once_if_streaming_does_not_fit():
    problem = case(startup=1000.0)
    streamed, pushed = problem.options
    options = (replace(streamed, client_bytes=99), pushed)
    problem = replace(problem, options=options)
    plan = solve(problem)
    assert weights_of(plan) == {"cut 3 · float16": 1.0}
    assert plan.pays_from_samples == 0
    assert any("streaming does not fit" in each for each in plan.reasons)
    with pytest.raises(ValueError, match="99 B of the client's 10 B"):
        stream(problem)


def test_named_plans_use_the_fastest_encoding():
    cuts = {
        (1, "float32"): {"link": 1.0, "server device": 0.02},
        (2, "float32"): {"link": 8.0, "server device": 0.05},
        (2, "float16"): {"link": 2.0, "server device": 0.05},
    }
    problem = case(cuts=cuts)
    assert freeze(problem).rule == "freeze"
    assert weights_of(freeze(problem)) == {"cut 2 · float16": 1.0}
    assert weights_of(static_at(problem, 2)) == {"cut 2 · float16": 1.0}
    assert static(problem).rule == "static"
    assert weights_of(static(problem)) == {"cut 1 · float32": 1.0}
    with pytest.raises(ValueError, match="there are cuts 0, 1, 2"):
        static_at(problem, 7)


@pytest.mark.parametrize(
    ("problem", "sentences"),
    [
        (
            case(link=25.0),
            [
                "samples are pushed down at cut 3 and sent as float16",
                "The link is busy all the time: it carries the stored samples",
                "times streaming",
                "A link slower than 80 bit/s would make it stream",
            ],
        ),
        (
            case(cuts=SMALL),
            ["with a much faster or slower link (it has 800 bit/s)"],
        ),
        (
            case(link=5.0),
            [
                "Streaming: the client reads all samples",
                "No cut is faster",
                "A link faster than 80 bit/s would make push-down",
            ],
        ),
        (
            case(link=1.0, client=9.0, startup=10.0, cuts=SLOW_SERVER),
            ["A link faster than", "bit/s would make it stream"],
        ),
    ],
    ids=["pushed", "not limited by the link", "streaming", "slow server"],
)
def test_reasons_name_limits_speed_and_crossover(problem, sentences):
    text = " ".join(solve(problem).reasons)
    assert [each for each in sentences if each not in text] == []


def test_reasons_do_not_name_an_unseen_link():
    assert "Tbit" not in " ".join(solve(case(link=UNSEEN_LINK)).reasons)


def test_crossover_includes_the_upload_of_the_package():
    cuts = {(3, "float16"): {"link": 0.5}}
    problem = case(num_samples=500, cuts=cuts)
    problem = replace(problem, startup=StartupCost(5000.0))
    # At 100 bytes/s streaming takes 0.1 s per sample, and the upload takes as
    # long as all 500 samples. At n bytes/s the upload takes 5000 / n seconds.
    plan = solve(problem)
    assert not plan.pushes
    crossover = crossover_bandwidth(problem, plan)
    # 500 * 0.1 = 5000 / n + 500 * 0.5 / n
    assert crossover == pytest.approx(105.0, rel=0.01)
    faster = problem.with_bandwidth(crossover * 1.01)
    seconds = 5000 / crossover / 1.01
    assert faster.push_one_off_seconds == pytest.approx(seconds)
    assert solve(faster).pushes
    assert not solve(problem.with_bandwidth(crossover / 1.01)).pushes


def test_crossover_is_found_between_links_with_the_same_choice():
    """Push-down pays on very slow and on fast links, but not in between."""
    cuts = {(3, "float16"): {"link": 0.2, "server device": 0.11}}
    problem = case(link=1e3, cuts=cuts)
    problem = replace(problem, startup=StartupCost(600.0))
    links = (1e-3, 10.0, 1e3, 1e6)
    pushed = [solve(problem.with_bandwidth(link)).pushes for link in links]
    assert pushed == [True, False, True, True]
    crossover = crossover_bandwidth(problem, solve(problem))
    assert 10 < crossover < 1e3
    assert not solve(problem.with_bandwidth(crossover * 0.99)).pushes
    assert solve(problem.with_bandwidth(crossover * 1.01)).pushes


def test_other_precision_floors_are_compared():
    lossless = case(link=1.0, cuts={(3, "float32"): {"link": 2.0}})
    half = case(link=1.0, cuts={(3, "float16"): {"link": 0.5}})
    plan = solve(lossless)
    assert not plan.pushes
    sentences = compare_precisions(plan, {"half": half, "uint8": lossless})
    assert sentences == (
        "With --min-precision half the plan would be cut 3 · float16, 2 "
        "times as fast: 2 samples/s.",
        "With --min-precision uint8 it would also stream.",
    )
    assert compare_precisions(solve(half), {"lossless": lossless}) == (
        "With --min-precision lossless the plan would be stream, 2 times as "
        "long: 1 samples/s.",
    )
    assert compare_precisions(solve(half), {"uint8": half}) == (
        "With --min-precision uint8 it would be no faster.",
    )


def test_weights_of_a_mix_are_normalised():
    problem = case()
    first, second = problem.options
    plan = evaluate(problem, [(second, 3.0), (first, 1.0)], "custom")
    assert plan.rule == "custom"
    assert weights_of(plan) == {"stream": 0.25, "cut 3 · float16": 0.75}
    assert plan.label == "75 % cut 3 · float16 + 25 % stream"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((0.0, 0.0), "every weight is 0"),
        ((-1.0, 2.0), "weight of stream is -1"),
        ((math.nan, 1.0), "weight of stream is nan"),
    ],
)
def test_invalid_weights_are_refused(weights, message):
    problem = case()
    with pytest.raises(ValueError, match=message):
        evaluate(problem, zip(problem.options, weights, strict=True), "custom")


UNKNOWN = Option(2, "uint8", {"link": 1.0}, 0, 0)


def test_what_no_plan_can_use_is_refused():
    with pytest.raises(ValueError, match="cut 2 · uint8 is not among"):
        evaluate(case(), [(UNKNOWN, 1.0)], "custom")
    with pytest.raises(ValueError, match="no option can run: there is no lin"):
        solve(case(link=0.0))
    with pytest.raises(ValueError, match=r"capacity of 'link' .* not -1"):
        Resource("link", -1.0, "bytes/s")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": ()}, "there is no option"),
        ({"resources": ()}, "there is no resource"),
        ({"num_samples": -1}, "number of samples must be .*, not -1"),
        ({"epochs": math.nan}, "number of epochs must be .*, not nan"),
        ({"startup": startup_of(math.inf)}, "startup cost must .*, not inf"),
        ({"last_cut": 2}, "cut 3 · float16 is after the last cut, 2"),
        ({"options": case().options * 2}, "option 'stream' occurs 2 times"),
        ({"options": case().options[1:]}, "streaming .* is not among"),
        ({"resources": case().resources * 2}, "resource 'link' occurs 2 tim"),
        ({"resources": case().resources[1:]}, "uses 'link', which is not amo"),
    ],
)
def test_invalid_problem_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(case(), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cut", "encoding", "use", "message"),
    [
        (1, "float32", {"link": -1.0}, "use of 'link' .* not -1"),
        (1, "float32", {"link": math.nan}, "use of 'link' .* not nan"),
        (1, "float32", {"link": 0.0}, "uses no resource"),
        (1, "raw", {"link": 1.0}, "cut 1 has encoding 'raw'"),
        (0, "float32", {"link": 1.0}, "cut 0 has encoding 'float32'"),
        (-1, "float32", {"link": 1.0}, "cut -1 is negative"),
    ],
)
def test_invalid_option_is_refused(cut, encoding, use, message):
    with pytest.raises(ValueError, match=message):
        Option(cut, encoding, use, 0, 0)


def test_plan_text_names_the_mix_and_its_limits():
    problem = case(link=25.0)
    plan = solve(problem)
    assert str(plan).startswith(f"{plan.label}: ")
    assert str(plan).endswith(f"limited by {' and '.join(plan.binding)}")
    given = evaluate(problem, plan.mix, "auto")
    assert given.reasons == plan.reasons[: len(given.reasons)]
    assert "sent as float16" in given.reasons[0]
