"""Which random changes the images of an epoch have."""

from __future__ import annotations

from typing import Any

import pytest

from hapi_client.data.augmentation_schedule import AugmentedEpochs
from hapi_protocol.errors import ClientError
from hapi_protocol.transforms import Training


def test_every_epoch_has_changes_of_its_own() -> None:
    epochs = AugmentedEpochs(augments=True, seed=3)
    assert epochs.variants is None
    assert [epochs.training(n) for n in (0, 1, 7)] == [
        Training(3, 0),
        Training(3, 1),
        Training(3, 7),
    ]


def test_changes_repeat_after_the_period() -> None:
    epochs = AugmentedEpochs(augments=True, seed=3, period=2)
    assert epochs.variants == 2
    found = [epochs.training(n) for n in range(4)]
    assert found == [Training(3, 0), Training(3, 1)] * 2


@pytest.mark.parametrize("augments", [True, False])
def test_evaluation_is_never_changed(augments: bool) -> None:
    assert AugmentedEpochs(augments, seed=3).training(None) is None


def test_without_augmentation_no_epoch_is_changed() -> None:
    epochs = AugmentedEpochs(augments=False, seed=2**70)
    assert epochs.training(4) is None
    assert epochs.variants == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((False, 0, 3), "augment_epochs is 3, and there is no augment"),
        ((True, 0, 0), "augment_epochs is 0"),
        ((True, 0, 2.0), "augment_epochs is 2.0"),
        ((True, 0, True), "augment_epochs is True"),
        ((True, -1, None), "seed is -1"),
        ((True, 2**63, None), "seed is 9223372036854775808"),
    ],
)
def test_values_that_cannot_be_are_named(
    values: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(ClientError, match=said) as caught:
        AugmentedEpochs(*values)
    assert caught.value.code == "bad_configuration"
