"""Which trainer this process is."""

from __future__ import annotations

import pytest
import torch

from hapi_client.sampling.distributed import Rank, this_rank
from hapi_protocol.errors import ClientError


def test_a_process_of_its_own_is_the_only_one():
    assert this_rank({}) == Rank(0, 1)


def test_torchruns_variables_are_read():
    assert this_rank({"RANK": "3", "WORLD_SIZE": "4"}) == Rank(3, 4)


@pytest.mark.parametrize(
    "given",
    [
        {"RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "one", "WORLD_SIZE": "2"},
    ],
)
def test_variables_that_make_no_sense_are_named(given):
    with pytest.raises(ClientError, match=r"RANK is .* and WORLD_SIZE is"):
        this_rank(given)


def test_torch_distributed_knows_better(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        assert this_rank({"RANK": "3", "WORLD_SIZE": "4"}) == Rank(0, 1)
    finally:
        torch.distributed.destroy_process_group()
