"""Schedule of random augmentations by epoch."""

import pytest

from hapi_client.sampling.augmentation_schedule import AugmentationSchedule
from hapi_protocol.errors import ClientError
from hapi_protocol.transforms import Training


@pytest.mark.parametrize(
    ("schedule", "variants", "epochs"),
    [
        (AugmentationSchedule(True, 3), None, [0, 1, 2, 3]),
        (AugmentationSchedule(True, 3, 2), 2, [0, 1, 0, 1]),
        (AugmentationSchedule(False, 2**70), 1, None),
    ],
)
def test_augmentations_follow_the_period(schedule, variants, epochs):
    assert schedule.variants == variants
    assert schedule.training(None) is None
    expected = [Training(3, n) for n in epochs] if epochs else [None] * 4
    assert [schedule.training(n) for n in range(4)] == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((False, 0, 3), "augment_period_epochs is 3, but there is no augment"),
        ((True, 0, 0), "augment_period_epochs is 0"),
        ((True, 0, 2.0), "augment_period_epochs is 2.0"),
        ((True, 0, True), "augment_period_epochs is True"),
        ((True, -1, None), "seed is -1"),
        ((True, 2**63, None), "seed is 9223372036854775808"),
    ],
)
def test_invalid_values_are_named(values, message):
    with pytest.raises(ClientError, match=message) as caught:
        AugmentationSchedule(*values)
    assert caught.value.code == "bad_configuration"
