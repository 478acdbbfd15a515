"""Texts of transforms: exactly one for each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi_protocol.errors import AnnotationError
from hapi_protocol.transforms import (
    MAX_NUMBER,
    Training,
    parse_transform,
    transform_text,
)

numbers = st.integers(0, MAX_NUMBER)


@given(seed=numbers, epoch=numbers)
def test_training_survives_its_text(seed, epoch):
    training = Training(seed, epoch)
    assert parse_transform(str(training)) == training


def test_accepted_texts():
    assert parse_transform("eval") is None
    assert transform_text(None) == "eval"
    text = f"train;seed=0;epoch={MAX_NUMBER}"
    assert parse_transform(text) == Training(0, MAX_NUMBER)


@pytest.mark.parametrize(
    "text",
    [
        *("", "train", "Eval", "eval;seed=1;epoch=2", "train;seed=1"),
        *("train;epoch=1;seed=2", "train;seed=1;epoch=2;"),
        *("train; seed=1; epoch=2", "train;seed=1;epoch=2\n"),
        *(f"train;seed={n};epoch=2" for n in ("01", "+1", "-1", "1.0", "")),
        *("train;seed=1;epoch=٣", f"train;seed={MAX_NUMBER + 1};epoch=0"),
        *(f"train;seed=0;epoch={n}" for n in (MAX_NUMBER + 1, "9" * 5000)),
    ],
)
def test_other_texts_are_refused(text):
    with pytest.raises(AnnotationError, match="train;seed=S") as caught:
        parse_transform(text)
    assert caught.value.code == "unknown_transform"
    assert caught.value.status == 400
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("value", [-1, MAX_NUMBER + 1, True, 1.0, None])
def test_numbers_out_of_range_are_errors(value):
    with pytest.raises(ValueError, match="epoch is"):
        Training(0, value)
    with pytest.raises(ValueError, match="seed is"):
        Training(value, 0)
