"""The tree of sums, and nodes of workers: pure functions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi_training.virtual_nodes.assignment import (
    balanced_counts,
    divided,
    even,
    step_seconds,
)
from hapi_training.virtual_nodes.reduction_tree import (
    PartialSums,
    node_order,
    total,
    whole_subtrees,
)


def added(left: str, right: str) -> str:
    return f"({left}+{right})"


def sum_of(assignment) -> str:
    """Adds the names of the nodes, as workers with these nodes do."""
    num_nodes = sum(map(len, assignment))
    sums = {}
    for nodes in assignment:
        partial = PartialSums(nodes, num_nodes, added)
        for node in node_order(num_nodes):
            if node in nodes:
                partial.put(node, str(node))
        assert list(partial.sums) == whole_subtrees(nodes, num_nodes)
        sums |= partial.sums
    return total(sums, added, num_nodes)


@st.composite
def assignments(draw):
    num_nodes = draw(st.integers(1, 40))
    owner = draw(
        st.lists(st.integers(0, 7), min_size=num_nodes, max_size=num_nodes)
    )
    groups = [
        [node for node in range(num_nodes) if owner[node] == rank]
        for rank in sorted(set(owner))
    ]
    return groups


@given(assignments())
def test_sum_is_added_in_one_order_whoever_has_the_nodes(assignment):
    num_nodes = sum(map(len, assignment))
    assert sum_of(assignment) == sum_of([list(range(num_nodes))])


def test_sum_of_eight_and_of_six_nodes():
    assert sum_of([range(8)]) == "(((0+4)+(2+6))+((1+5)+(3+7)))"
    assert sum_of([range(6)]) == "(((0+2)+4)+((1+3)+5))"
    assert sum_of([range(1)]) == "0"


@pytest.mark.parametrize("num_nodes", [1, 2, 6, 8, 12, 16, 30])
def test_even_workers_have_whole_subtrees(num_nodes):
    for ranks in range(1, num_nodes + 1):
        assignment = even(num_nodes, ranks)
        assert sorted(itertools.chain(*assignment)) == [*range(num_nodes)]
        sizes = [len(nodes) for nodes in assignment]
        assert max(sizes) - min(sizes) <= 1
        if num_nodes in (2, 8, 16) and not num_nodes % ranks:
            assert all(
                len(whole_subtrees(nodes, num_nodes)) == 1
                for nodes in assignment
            )


@given(
    st.lists(
        st.sampled_from([1.0, 1.5, 2.0, 3.0, 7.0]), min_size=1, max_size=4
    ),
    st.integers(0, 8),
)
def test_balanced_nodes_are_as_good_as_the_best(seconds, more):
    num_nodes = len(seconds) + more
    found = balanced_counts(num_nodes, seconds)
    best = min(
        step_seconds(counts, seconds)
        for counts in itertools.product(
            range(1, num_nodes + 1), repeat=len(seconds)
        )
        if sum(counts) == num_nodes
    )
    assert sum(found) == num_nodes
    assert step_seconds(found, seconds) == best
    assert [len(nodes) for nodes in divided(num_nodes, found)] == found


def test_balanced_nodes_have_few_subtrees_to_exchange():
    # 5 and 3 nodes are two subtrees each.
    assert balanced_counts(8, [1.0, 2.05], 1.05) == [6, 2]
    assert balanced_counts(8, [1.0, 1.95], 1.05) == [6, 2]
    assert balanced_counts(8, [1.0, 1.95], 1.01) == [5, 3]
