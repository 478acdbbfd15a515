"""Cost components and the resources that they use."""

import pytest

from hapi_splitter.planner.problem import UNITS, Option
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


def problem_with(share=1.0, **threads):
    threads = {"server_threads": 0, "client_threads": 0} | threads
    use = resource_use(1000.0, WORK, server_share=share, **threads)
    option = Option(0, "raw", use, 0, 0, WORK)
    return problem_of([option], CAPACITIES, **threads)


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize(
    ("server", "client"), [(0, 0), (2, 4), (4, 8), (0, 8)]
)
def test_stages_of_a_resource_sum_to_its_use(share, server, client):
    problem = problem_with(
        share=share, server_threads=server, client_threads=client
    )
    (option,) = problem.options
    by_resource = stages(problem, option)
    expected = {name: problem.seconds(option, name) for name in UNITS}
    # 4 and 8 are all cores of their tier: the layers count for its CPU.
    if server == 4:
        expected["server device"] = 0.0
    if client == 8:
        expected["client device"] = 0.0
    sums = {name: sum(by_resource[name].values()) for name in UNITS}
    assert sums == pytest.approx(expected)


def test_layers_count_for_the_cores_that_compute_them():
    problem = problem_with(server_threads=2, client_threads=4)
    by_resource = stages(problem, problem.options[0])
    server = {"serving": 1e-3, "server decoding": 2e-3}
    server["server layers"] = 2 * 3e-3
    client = {"client decoding": 4e-3, "client handling": 6e-3}
    client |= {"client layers": 4 * 5e-3, "training": 4 * 7e-3}
    for name, work, cores in (("server", server, 4), ("client", client, 8)):
        expected = {kind: seconds / cores for kind, seconds in work.items()}
        assert by_resource[f"{name} cpu"] == pytest.approx(expected)
    assert by_resource["link"] == {"link": pytest.approx(1e-3)}


def test_option_without_components_has_its_use_by_resource():
    bare = Option(0, "raw", {"link": 500.0, "client cpu": 4.0}, 0, 0)
    by_resource = stages(problem_with(), bare)
    assert by_resource["link"] == {"link": pytest.approx(0.5e-3)}
    assert by_resource["client cpu"] == {"client cpu": pytest.approx(0.5)}
    assert by_resource["server device"] == {"server device": 0.0}
