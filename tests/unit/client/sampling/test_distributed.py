"""Rank of the process."""

import pytest
import torch

from hapi_client.sampling.distributed import Rank, this_rank
from hapi_protocol.errors import ClientError


@pytest.mark.parametrize(
    ("environ", "rank"),
    [({}, Rank(0, 1)), ({"RANK": "3", "WORLD_SIZE": "4"}, Rank(3, 4))],
)
def test_rank_is_read_from_the_environment(environ, rank):
    assert this_rank(environ) == rank


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "one", "WORLD_SIZE": "2"},
    ],
)
def test_invalid_variables_are_named(environ):
    with pytest.raises(ClientError, match=r"RANK is .* and WORLD_SIZE is"):
        this_rank(environ)


def test_torch_distributed_overrides_the_environment(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        assert this_rank({"RANK": "3", "WORLD_SIZE": "4"}) == Rank(0, 1)
    finally:
        torch.distributed.destroy_process_group()
