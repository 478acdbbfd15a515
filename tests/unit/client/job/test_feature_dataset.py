"""Feature data sets in the workers of torch's ``DataLoader``, and copies."""

import copy
import pickle
import warnings
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

from hapi_client.job.feature_dataset import FeatureDataset
from hapi_client.sampling.epochs import EpochOptions, Epochs
from hapi_client.sampling.partition import EpochPartition
from hapi_protocol.errors import ClientError

SIZES = [7, 16, 3, 16, 11, 16, 9]
NUM_STEPS = 10
COPIES = {
    "itself": lambda made: made,
    "deepcopy": copy.deepcopy,
    "pickle": lambda made: pickle.loads(pickle.dumps(made)),
}


class Steps(FeatureDataset):
    """Yields epoch and step in place of features."""

    def __iter__(self):
        share, epoch = self._position.begin()
        for batch in share.read_plan.batches:
            yield [epoch, batch.step]


class FakePipeline:
    """Order and state of a pipeline, without data."""

    def __init__(self):
        partition = EpochPartition(1, 2)
        epochs = Epochs(SIZES, "d" * 64, EpochOptions(8, partition=partition))
        split = SimpleNamespace(sizes=SIZES)
        self.data = SimpleNamespace(epochs=epochs, split=lambda name: split)
        self.load_state_dict = epochs.load_state_dict

    def dataset_config(self, split):
        return SimpleNamespace(data=split)


def made(step=0, shuffle=True):
    dataset = Steps.of_pipeline(
        FakePipeline(), "train", shuffle=shuffle, drop_last=False, shared=True
    )
    if step:
        dataset.load_state_dict(dataset.state_dict(step))
    return dataset


def loader_of(dataset, **options):
    return DataLoader(
        dataset, batch_size=None, num_workers=2, timeout=300, **options
    )


@pytest.mark.parametrize("kind", COPIES)
def test_workers_that_persist_see_each_epoch_of_a_copy(kind):
    original = made()
    dataset = COPIES[kind](original)
    loader = loader_of(dataset, persistent_workers=True)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        assert list(loader) == [[epoch, step] for step in range(NUM_STEPS)]
    assert original.epoch == (2 if dataset is original else 0)
    for bad in (0.5, -1, 10**30):
        with pytest.raises(ClientError, match=r"epoch is .*give an integer"):
            dataset.set_epoch(bad)


@pytest.mark.parametrize("kind", COPIES)
def test_copy_continues_once_from_a_state(kind):
    dataset = COPIES[kind](made(4))
    loader = loader_of(dataset)
    assert list(loader) == [[0, step] for step in range(4, NUM_STEPS)]
    with pytest.raises(ClientError, match=r"call set_epoch\(1\) before"):
        # In this process: an error from a worker would keep the workers
        # until it is collected.  The flag is in shared memory.
        list(dataset)
    dataset.set_epoch(1)
    assert list(loader) == [[1, step] for step in range(NUM_STEPS)]


def test_length_is_that_of_a_whole_epoch_after_a_resume():
    """Lightning expects this; it continues with the number of the step."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = loader_of(made(4))
        assert len(list(loader)) == NUM_STEPS - 4
        assert len(loader) == NUM_STEPS


def test_state_needs_the_steps_taken_when_workers_read_ahead():
    dataset = made()
    assert dataset.state_dict() == dataset.state_dict(0)
    dataset._position.num_workers[0] = 2
    with pytest.raises(ClientError, match=r"state_dict\(step \+ 1\)"):
        dataset.state_dict()


def test_order_of_the_index_has_no_position_to_save():
    state, dataset = made(4).state_dict(), made(shuffle=False)
    with pytest.raises(ClientError, match="only training has a position"):
        dataset.state_dict(1)
    with pytest.raises(ClientError, match="only training has a position"):
        dataset.load_state_dict(state)
