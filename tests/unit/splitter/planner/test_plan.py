"""The planner: properties of its optimum, and cases known by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hapi_splitter.planner.plan import (
    Option,
    Plan,
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
from hapi_splitter.planner.problem import RESOURCES, UNITS, UNSEEN_LINK

CLOSE = 1e-5
"""Twenty times what ties may cost."""

amounts = st.floats(-3, 3).map(lambda exponent: 10**exponent)
ENCODINGS = ("float32", "float16", "uint8;zstd")


@st.composite
def problems(draw: st.DrawFn) -> Problem:
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
        push_one_off_seconds=draw(st.just(0.0) | amounts),
        server_limit_bytes=10,
        client_limit_bytes=10,
        last_cut=9,
    )


def free(problem: Problem) -> Problem:
    """Without one-off costs, with samples to come."""
    return replace(
        problem, push_one_off_seconds=0.0, num_samples=1000, epochs=1.0
    )


def chosen_for(problem: Problem) -> Plan:
    """As ``solve``, without most of its time: the link that reasons name."""
    with patch(
        "hapi_splitter.planner.plan.crossover_bandwidth", return_value=None
    ):
        return solve(problem)


def shares(plan: Plan) -> dict[str, float]:
    return {option.label: weight for option, weight in plan.mix}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problems())
def test_no_single_option_beats_the_plan(problem: Problem) -> None:
    problem = free(problem)
    plan = solve(problem)
    for option in problem.options:
        if problem.fits(option):
            alone = evaluate(problem, [(option, 1.0)], "static")
            slack = 1 + CLOSE
            assert plan.samples_per_second * slack >= alone.samples_per_second


def vertices(problem: Problem) -> Iterator[float]:
    """Samples per second at each corner of what is feasible.

    Every choice of as many columns as there are resources, of options and of
    what is left of a resource, whose solution is not negative.
    """
    fitting = [option for option in problem.options if problem.fits(option)]
    part = np.array(
        [
            [problem.seconds(option, r.name) for option in fitting]
            for r in problem.resources
        ]
    )
    size = len(problem.resources)
    columns = np.hstack([part, np.eye(size)])
    for chosen in combinations(range(columns.shape[1]), size):
        basis = columns[:, chosen]
        if np.linalg.cond(basis) > 1e10:
            continue
        found = np.linalg.solve(basis, np.ones(size))
        if found.min() < -1e-9 * np.abs(found).max():
            continue
        yield sum(
            x for x, c in zip(found, chosen, strict=True) if c < len(fitting)
        )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problems())
def test_the_plan_is_as_fast_as_the_fastest_corner(problem: Problem) -> None:
    problem = free(problem)
    plan = solve(problem)
    best = max(vertices(problem))
    assert plan.samples_per_second == pytest.approx(best, rel=CLOSE)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problems())
def test_no_named_plan_takes_less_time(problem: Problem) -> None:
    total = chosen_for(problem).total_seconds
    assert total <= stream(problem).total_seconds * (1 + CLOSE)
    assert total <= static(problem).total_seconds * (1 + CLOSE)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problems())
def test_a_plan_is_feasible_and_its_shares_sum_to_one(
    problem: Problem,
) -> None:
    plan = solve(problem)
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
def test_the_unit_of_a_resource_does_not_matter(
    problem: Problem, name: str, unit: float
) -> None:
    other = replace(
        problem,
        resources=tuple(
            replace(r, capacity=r.capacity * unit) if r.name == name else r
            for r in problem.resources
        ),
        options=tuple(
            replace(
                option,
                use={
                    n: u * unit if n == name else u
                    for n, u in option.use.items()
                },
            )
            for option in problem.options
        ),
    )
    assert shares(chosen_for(other)) == shares(chosen_for(problem))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems(), st.floats(-12, 12).map(lambda exponent: 10**exponent))
def test_the_unit_of_time_does_not_matter(
    problem: Problem, unit: float
) -> None:
    other = replace(
        problem,
        resources=tuple(
            replace(r, capacity=r.capacity / unit) for r in problem.resources
        ),
        push_one_off_seconds=problem.push_one_off_seconds * unit,
    )
    assert chosen_for(other).total_seconds == pytest.approx(
        chosen_for(problem).total_seconds * unit, rel=CLOSE
    )
    assert chosen_for(free(other)).samples_per_second * unit == pytest.approx(
        chosen_for(free(problem)).samples_per_second, rel=CLOSE
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_options_and_resources_does_not_matter(
    problem: Problem, chance: random.Random
) -> None:
    options, resources = list(problem.options), list(problem.resources)
    chance.shuffle(options)
    chance.shuffle(resources)
    other = replace(
        problem, options=tuple(options), resources=tuple(resources)
    )
    found, expected = chosen_for(other), chosen_for(problem)
    assert found.mix == expected.mix
    assert set(found.binding) == set(expected.binding)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems(), st.lists(amounts, min_size=2, max_size=4))
def test_more_one_off_cost_never_helps(
    problem: Problem, costs: list[float]
) -> None:
    plans = [
        chosen_for(replace(problem, push_one_off_seconds=cost))
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
def test_push_down_is_chosen_exactly_from_where_it_pays(
    problem: Problem,
) -> None:
    plan = chosen_for(problem)
    if plan.pays_from_samples is None:
        assert not plan.pushes
    elif problem.remaining_samples > plan.pays_from_samples * (1 + CLOSE):
        assert plan.pushes
    elif problem.remaining_samples < plan.pays_from_samples * (1 - CLOSE):
        assert not plan.pushes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems(), st.data())
def test_an_option_more_never_makes_it_slower(
    problem: Problem, data: st.DataObject
) -> None:
    problem = free(problem)
    count = len(problem.options)
    kept = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    fewer = tuple(
        option
        for option, keep in zip(problem.options, kept, strict=True)
        if keep or option.cut == 0
    )
    reduced = replace(problem, options=fewer)
    assert chosen_for(problem).samples_per_second * (1 + CLOSE) >= (
        chosen_for(reduced).samples_per_second
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems(), st.sampled_from(RESOURCES), st.floats(1, 100))
def test_more_capacity_never_makes_it_slower(
    problem: Problem, name: str, factor: float
) -> None:
    problem = free(problem)
    more = replace(
        problem,
        resources=tuple(
            replace(r, capacity=r.capacity * factor) if r.name == name else r
            for r in problem.resources
        ),
    )
    assert chosen_for(more).samples_per_second * (1 + CLOSE) >= (
        chosen_for(problem).samples_per_second
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems())
def test_the_choice_turns_where_it_is_said_to_turn(problem: Problem) -> None:
    plan = solve(problem)
    turning = crossover_bandwidth(problem, plan)
    if turning is None:
        return
    faster = turning > problem.capacity("link")
    for factor, same in ((1.01, False), (0.99, True)):
        link = turning * (factor if faster else 1 / factor)
        changed = with_bandwidth(problem, link)
        if clear(changed):
            assert (solve(changed).pushes == plan.pushes) is same


def clear(problem: Problem) -> bool:
    """Whether pushing and streaming differ by more than what ties cost."""
    best = solve(replace(problem, push_one_off_seconds=0.0))
    to_come = problem.remaining_samples
    if not best.pushes or not to_come:
        return False
    pushing = problem.push_one_off_seconds + to_come / best.samples_per_second
    ratio = pushing / stream(problem).total_seconds
    return abs(ratio - 1) > 1e-4


def with_bandwidth(problem: Problem, capacity: float) -> Problem:
    return replace(
        problem,
        resources=tuple(
            replace(r, capacity=capacity) if r.name == "link" else r
            for r in problem.resources
        ),
    )


def case(
    link: float = 100.0,
    server: float = 1.0,
    client: float = 1.0,
    one_off: float = 0.0,
    num_samples: int = 1000,
    cuts: dict[tuple[int, str], dict[str, float]] | None = None,
) -> Problem:
    """Streaming: 1 byte and 0.1 client seconds; pushed: 0.05 of the server.

    So each tier does 10 or 20 samples a second on its own.
    """
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
        push_one_off_seconds=one_off,
        server_limit_bytes=10,
        client_limit_bytes=10,
        last_cut=max(cut for cut, _ in pushed),
    )


def test_rates_of_both_tiers_add_up_when_the_link_is_wide() -> None:
    plan = solve(case())
    assert plan.samples_per_second == pytest.approx(30, rel=CLOSE)
    assert shares(plan) == pytest.approx(
        {"stream": 1 / 3, "cut 3 · float16": 2 / 3}, rel=1e-3
    )
    assert plan.binding == ("server device", "client device")
    assert plan.total_seconds == pytest.approx(1000 / 30, rel=CLOSE)
    assert plan.pays_from_samples == 0
    assert plan.utilisation["link"] == pytest.approx(0.3, rel=CLOSE)


def test_it_streams_when_the_link_limits_all_alike() -> None:
    plan = solve(case(link=5.0))
    assert shares(plan) == {"stream": 1.0}
    assert plan.binding == ("link",)
    assert plan.samples_per_second == pytest.approx(5)
    assert plan.pays_from_samples is None


def test_it_pushes_all_when_the_link_limits_and_features_are_smaller() -> None:
    cuts = {(3, "float16"): {"link": 0.1, "server device": 0.05}}
    plan = solve(case(link=1.0, cuts=cuts))
    assert shares(plan) == {"cut 3 · float16": 1.0}
    assert plan.samples_per_second == pytest.approx(10)
    assert plan.binding == ("link",)


def test_it_mixes_two_cuts_when_server_and_link_both_limit() -> None:
    cuts = {
        (1, "float32"): {"link": 0.8, "server device": 0.01},
        (2, "float32"): {"link": 0.2, "server device": 0.1},
    }
    plan = solve(case(link=5.0, client=1e-9, cuts=cuts))
    assert {option.cut for option, _ in plan.mix} == {1, 2}
    assert set(plan.binding) == {"link", "server device"}
    # 0.8 x + 0.2 y = 5 and 0.01 x + 0.1 y = 1
    assert plan.samples_per_second == pytest.approx(
        3.846153846 + 9.615384615, rel=CLOSE
    )


@pytest.mark.parametrize("share", [0.0, 1e-12])
def test_it_streams_when_there_is_no_server_left(share: float) -> None:
    plan = solve(case(server=share))
    assert plan.samples_per_second == pytest.approx(10, rel=CLOSE)
    assert shares(plan).get("stream", 0) == pytest.approx(1, abs=1e-6)


def test_it_streams_when_samples_are_too_few_for_the_one_off_cost() -> None:
    problem = case(one_off=60.0, num_samples=800)
    plan = solve(problem)
    assert shares(plan) == {"stream": 1.0}
    assert plan.one_off_seconds == 0
    # 60 s / (1/10 s - 1/30 s)
    assert plan.pays_from_samples == pytest.approx(900, rel=1e-4)
    assert any("pays from 900 samples" in each for each in plan.reasons)
    soon = solve(replace(problem, push_one_off_seconds=0.1))
    assert soon.pays_from_samples == pytest.approx(1.5, rel=1e-4)
    assert any("pays from 2 samples" in each for each in soon.reasons)
    more = solve(replace(problem, epochs=2.0))
    assert more.pushes
    assert more.total_seconds == pytest.approx(60 + 1600 / 30, rel=CLOSE)


def test_equal_options_are_decided_for_streaming_then_the_first() -> None:
    same = {"link": 1.0, "client device": 0.1}
    cuts = {(2, "float32"): same, (1, "float32"): dict(same)}
    assert shares(solve(case(cuts=cuts))) == {"stream": 1.0}
    better = {"link": 1.0, "client device": 0.05}
    cuts = {(2, "float32"): better, (1, "float32"): dict(better)}
    assert shares(solve(case(cuts=cuts))) == {"cut 1 · float32": 1.0}


def test_equal_encodings_are_decided_for_the_most_exact() -> None:
    use = {"link": 1.0, "server device": 0.05}
    cuts = {
        (3, encoding): dict(use)
        for encoding in ("uint8", "float32;lz4", "bfloat16", "float32")
    }
    problem = case(cuts=cuts)
    assert set(shares(solve(problem))) == {"stream", "cut 3 · float32"}
    assert shares(freeze(problem)) == {"cut 3 · float32": 1.0}


def test_a_mix_leaves_out_what_it_can_do_without() -> None:
    use = {"link": 1.0, "server device": 0.05}
    cuts = {(cut, "float32"): dict(use) for cut in (1, 2, 3, 4)}
    assert set(shares(solve(case(cuts=cuts)))) == {"stream", "cut 1 · float32"}


def test_a_tie_does_not_bring_crumbs_of_streaming_into_a_mix() -> None:
    cuts = {
        (1, "float32"): {"link": 0.8, "server device": 0.01},
        (2, "float32"): {"link": 0.2, "server device": 0.1},
    }
    problem = case(link=5.0, cuts=cuts)
    image, *pushed = problem.options
    # A little worse than a mix of the two: what a tie allows buys 1e-4.
    image = replace(image, use={"link": 0.4545, "server device": 0.063125})
    plan = solve(replace(problem, options=(image, *pushed)))
    assert {option.cut for option, _ in plan.mix} == {1, 2}


def test_a_cut_without_room_is_left_out_and_named() -> None:
    problem = case()
    stream_option, pushed = problem.options
    problem = replace(
        problem, options=(stream_option, replace(pushed, server_bytes=11))
    )
    plan = solve(problem)
    assert shares(plan) == {"stream": 1.0}
    assert any(
        "cut 3" in each and "11 B of the server's 10 B" in each
        for each in plan.reasons
    )
    with pytest.raises(ValueError, match="lack of memory"):
        freeze(problem)


def test_push_down_pays_at_once_when_streaming_has_no_room() -> None:
    problem = case(one_off=1000.0)
    stream_option, pushed = problem.options
    problem = replace(
        problem, options=(replace(stream_option, client_bytes=99), pushed)
    )
    plan = solve(problem)
    assert shares(plan) == {"cut 3 · float16": 1.0}
    assert plan.pays_from_samples == 0
    assert any("streaming does not fit" in each for each in plan.reasons)
    with pytest.raises(ValueError, match="99 B of the client's 10 B"):
        stream(problem)


def test_named_plans_take_the_fastest_encoding() -> None:
    cuts = {
        (1, "float32"): {"link": 1.0, "server device": 0.02},
        (2, "float32"): {"link": 8.0, "server device": 0.05},
        (2, "float16"): {"link": 2.0, "server device": 0.05},
    }
    problem = case(cuts=cuts)
    assert shares(freeze(problem)) == {"cut 2 · float16": 1.0}
    assert shares(static_at(problem, 2)) == {"cut 2 · float16": 1.0}
    assert shares(static(problem)) == {"cut 1 · float32": 1.0}
    assert [plan.rule for plan in (freeze(problem), static(problem))] == [
        "freeze",
        "static",
    ]
    with pytest.raises(ValueError, match="there are cuts 0, 1, 2"):
        static_at(problem, 7)


def test_reasons_name_limits_speed_and_what_would_change_it() -> None:
    plan = solve(case(link=25.0))
    text = " ".join(plan.reasons)
    assert "of the samples are pushed at cut 3 and travel as float16" in text
    assert (
        "The link is busy all the time: it carries the stored samples" in text
    )
    assert "times streaming" in text
    assert "A link slower than 80 bit/s would make it stream" in text
    small = {(3, "float16"): {"link": 0.1, "server device": 0.05}}
    text = " ".join(solve(case(cuts=small)).reasons)
    assert "with a far faster or slower link, too (it has 800 bit/s)" in text
    unseen = " ".join(solve(case(link=UNSEEN_LINK)).reasons)
    assert "Tbit" not in unseen
    streaming = " ".join(solve(case(link=5.0)).reasons)
    assert streaming.startswith("Streaming: all samples come as they are")
    assert "No cut is faster" in streaming
    assert "A link faster than 80 bit/s would make push-down" in streaming


def test_a_faster_link_is_named_that_would_make_it_stream() -> None:
    cuts = {(3, "float16"): {"link": 0.1, "server device": 0.2}}
    problem = case(link=1.0, server=1.0, client=9.0, one_off=10.0, cuts=cuts)
    plan = solve(problem)
    assert plan.pushes
    turning = crossover_bandwidth(problem, plan)
    assert turning is not None
    assert any("would make it stream" in each for each in plan.reasons)
    assert solve(with_bandwidth(problem, turning * 0.99)).pushes
    assert not solve(with_bandwidth(problem, turning * 1.01)).pushes


def test_the_package_goes_over_the_link_that_would_turn_the_choice() -> None:
    cuts = {(3, "float16"): {"link": 0.5}}
    problem = replace(
        case(link=100.0, client=1.0, one_off=50.0, num_samples=500, cuts=cuts),
        upload_bytes=5000.0,
    )
    # At 100 bytes/s streaming takes 0.1 s a sample, and sending the package
    # as long as all 500 of them. At n bytes/s it takes 5000 / n seconds.
    plan = solve(problem)
    assert not plan.pushes
    turning = crossover_bandwidth(problem, plan)
    assert turning is not None
    faster = problem.with_bandwidth(turning * 1.01)
    assert faster.push_one_off_seconds == pytest.approx(5000 / turning / 1.01)
    assert solve(faster).pushes
    assert not solve(problem.with_bandwidth(turning / 1.01)).pushes
    # 500 * 0.1 = 5000 / n + 500 * 0.5 / n
    assert turning == pytest.approx(105.0, rel=0.01)


def test_a_link_that_turns_the_choice_is_found_between_two_that_do_not() -> (
    None
):
    """A package of such a size pays on slow links, and on fast ones."""
    cuts = {(3, "float16"): {"link": 0.2, "server device": 0.11}}
    problem = replace(
        case(link=1e3, one_off=0.6, num_samples=1000, cuts=cuts),
        upload_bytes=600.0,
    )
    links = (1e-3, 10.0, 1e3, 1e6)
    pushed = [solve(problem.with_bandwidth(link)).pushes for link in links]
    assert pushed == [True, False, True, True]
    turning = crossover_bandwidth(problem, solve(problem))
    assert turning is not None
    assert 10 < turning < 1e3
    assert not solve(problem.with_bandwidth(turning * 0.99)).pushes
    assert solve(problem.with_bandwidth(turning * 1.01)).pushes


def test_another_floor_is_told_apart_by_what_it_gains() -> None:
    lossless = case(link=1.0, cuts={(3, "float32"): {"link": 2.0}})
    half = case(link=1.0, cuts={(3, "float16"): {"link": 0.5}})
    plan = solve(lossless)
    assert not plan.pushes
    sentences = compare_precisions(plan, {"half": half, "uint8": lossless})
    assert sentences == (
        "With --min-precision half the plan would be cut 3 · float16, 2 "
        "times as fast: 2 samples/s.",
        "With --min-precision uint8 it would stream all the same.",
    )
    assert compare_precisions(solve(half), {"lossless": lossless}) == (
        "With --min-precision lossless the plan would be stream, 2 times as "
        "long: 1 samples/s.",
    )
    assert compare_precisions(solve(half), {"uint8": half}) == (
        "With --min-precision uint8 it would be no faster.",
    )


def test_weights_of_a_given_mix_are_scaled() -> None:
    problem = case()
    first, second = problem.options
    plan = evaluate(problem, [(second, 3.0), (first, 1.0)], "mine")
    assert plan.rule == "mine"
    assert shares(plan) == {"stream": 0.25, "cut 3 · float16": 0.75}
    assert plan.label == "75 % cut 3 · float16 + 25 % stream"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((0.0, 0.0), "every weight is 0"),
        ((-1.0, 2.0), "weight of stream is -1"),
        ((math.nan, 1.0), "weight of stream is nan"),
    ],
)
def test_a_bad_mix_is_refused(
    weights: tuple[float, ...], message: str
) -> None:
    problem = case()
    with pytest.raises(ValueError, match=message):
        evaluate(problem, zip(problem.options, weights, strict=True), "mine")


def test_a_mix_with_something_else_is_refused() -> None:
    stranger = Option(2, "uint8", {"link": 1.0}, 0, 0)
    with pytest.raises(ValueError, match="cut 2 · uint8 is none of"):
        evaluate(case(), [(stranger, 1.0)], "mine")


def test_a_problem_without_a_link_to_use_is_refused() -> None:
    with pytest.raises(ValueError, match="no option can run: there is no lin"):
        solve(case(link=0.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": ()}, "there is no option"),
        ({"resources": ()}, "there is no resource"),
        ({"num_samples": -1}, "number of samples is -1"),
        ({"epochs": math.nan}, "number of epochs is nan"),
        ({"push_one_off_seconds": math.inf}, "one-off cost is inf"),
        ({"last_cut": 2}, "cut 3 · float16 lies behind the last cut, 2"),
        ({"options": case().options * 2}, "option 'stream' is there 2 times"),
        ({"options": case().options[1:]}, "streaming .* is not among"),
        (
            {"resources": case().resources * 2},
            "resource 'link' is there 2 times",
        ),
        (
            {"resources": case().resources[1:]},
            "takes of 'link', which is not among",
        ),
    ],
)
def test_a_bad_problem_is_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(case(), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cut", "encoding", "use", "message"),
    [
        (1, "float32", {"link": -1.0}, "takes of 'link' is -1"),
        (1, "float32", {"link": math.nan}, "takes of 'link' is nan"),
        (1, "float32", {"link": 0.0}, "takes nothing"),
        (1, "raw", {"link": 1.0}, "cut 1 has encoding 'raw'"),
        (0, "float32", {"link": 1.0}, "cut 0 has encoding 'float32'"),
        (-1, "float32", {"link": 1.0}, "cut -1 is negative"),
    ],
)
def test_a_bad_option_is_refused(
    cut: int, encoding: str, use: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Option(cut, encoding, use, 0, 0)


def test_a_resource_without_a_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity of 'link' is -1"):
        Resource("link", -1.0, "bytes/s")


def test_a_plan_reads_as_what_it_does_and_what_limits_it() -> None:
    problem = case(link=25.0)
    plan = solve(problem)
    assert str(plan).startswith(f"{plan.label}: ")
    assert str(plan).endswith(f"limited by {' and '.join(plan.binding)}")
    given = evaluate(problem, plan.mix, "auto")
    assert given.reasons == plan.reasons[: len(given.reasons)]
    assert "travel as float16" in given.reasons[0]
