"""Kinds of work, and the resources that they take."""

from __future__ import annotations

import pytest

from hapi_splitter.planner.problem import UNITS, Option, Problem
from hapi_splitter.planner.resource_use import KINDS, resource_use, stages
from problems import problem_of

WORK = {kind: number / 1000 for number, kind in enumerate(KINDS, 1)}
CAPACITIES = {
    "link": 1e6,
    "server cpu": 4.0,
    "server device": 2.0,
    "client cpu": 8.0,
    "client device": 1.0,
}


def worked(
    *, share: float = 1.0, server_threads: int = 0, client_threads: int = 0
) -> Problem:
    threads = {
        "server_threads": server_threads,
        "client_threads": client_threads,
    }
    use = resource_use(1000.0, WORK, server_share=share, **threads)
    return problem_of(
        [Option(0, "raw", use, 0, 0, WORK)], CAPACITIES, **threads
    )


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize(
    ("server", "client"), [(0, 0), (2, 4), (4, 8), (0, 8)]
)
def test_stages_of_a_resource_are_all_that_it_does(
    share: float, server: int, client: int
) -> None:
    problem = worked(share=share, server_threads=server, client_threads=client)
    (option,) = problem.options
    found = stages(problem, option)
    for resource in UNITS:
        # 4 and 8 are all cores of their tier.
        on_cores = (resource == "server device" and server == 4) or (
            resource == "client device" and client == 8
        )
        assert sum(found[resource].values()) == pytest.approx(
            0.0 if on_cores else problem.seconds(option, resource)
        )


def test_layers_are_with_the_cores_that_compute_them() -> None:
    problem = worked(server_threads=2, client_threads=4)
    found = stages(problem, problem.options[0])
    assert found["server cpu"] == pytest.approx(
        {
            "serving": 1e-3 / 4,
            "server decoding": 2e-3 / 4,
            "server layers": 2 * 3e-3 / 4,
        }
    )
    assert found["client cpu"] == pytest.approx(
        {
            "client decoding": 4e-3 / 8,
            "client handling": 6e-3 / 8,
            "client layers": 4 * 5e-3 / 8,
            "training": 4 * 7e-3 / 8,
        }
    )
    assert found["link"] == {"link": pytest.approx(1e-3)}


def test_of_a_bare_option_the_resources_are_known() -> None:
    problem = worked()
    bare = Option(0, "raw", {"link": 500.0, "client cpu": 4.0}, 0, 0)
    found = stages(problem, bare)
    assert found["link"] == {"link": pytest.approx(0.5e-3)}
    assert found["client cpu"] == {"client cpu": pytest.approx(0.5)}
    assert found["server device"] == {"server device": 0.0}
