"""Random augmentation: the parameters drawn and the pixels produced."""

import hashlib
import json
import math
import os
import struct
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms.v2 import functional

from augmented_pixels import EVERYTHING, FIRST, noise, photo, pixels_digest
from hapi_protocol.transforms import Training
from hapi_splitter.inputs.augmentation import (
    JITTER,
    NUM_WORDS,
    Augmentation,
    Crop,
    SampleAugmentation,
    random_words,
)
from hapi_splitter.inputs.image_transform import ImageTransform

HEIGHT, WIDTH = 375, 500
FACTORS = (0.3, 0.77, 1.23, 1.9)
MASK = 2**64 - 1

PIXELS_PROGRAM = """
import sys
sys.path[:] = {path!r}
from augmented_pixels import pixels_digest
print(pixels_digest())
"""


def philox(key, counter):
    """Computes a block of Philox4x64-10 as in the paper's figure 4."""
    first, second = key
    a, b, c, d = counter
    for _ in range(10):
        low, high = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b = high >> 64 ^ b ^ first, high & MASK
        c, d = low >> 64 ^ d ^ second, low & MASK
        first = first + 0x9E3779B97F4A7C15 & MASK
        second = second + 0xBB67AE8584CAA73B & MASK
    return [a, b, c, d]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("training", "key"),
    [
        (Training(0, 0), ""),
        (Training(1, 2), "n01440764_10026"),
        (Training(2**63 - 1, 2**63 - 1), "ünï/ключ"),
    ],
)
def test_words_are_those_of_philox(training, key):
    digest = hashlib.sha256(key.encode()).digest()
    high = struct.unpack("<3Q", digest[:24])
    expected = []
    for block in range(1, NUM_WORDS // 4 + 1):
        expected += philox((training.seed, training.epoch), [block, *high])
    assert random_words(training, key) == expected


def test_draws_of_known_keys_do_not_change():
    """Cached features and reproducible runs depend on these values."""
    training = Training(7, 3)
    assert random_words(training, "a/0001")[:3] == [
        12124809287895701019,
        12964766784078721130,
        18177783730741891969,
    ]
    drawn = EVERYTHING.draw(training, "a/0001", HEIGHT, WIDTH)
    assert drawn == SampleAugmentation(
        Crop(top=37, left=74, height=338, width=380),
        horizontal_flip=True,
        vertical_flip=True,
        jitter=(
            ("brightness", 1.328350405535362),
            ("hue", 0.14208648198794804),
            ("contrast", 0.8182813405059874),
            ("saturation", 0.07233717394730066),
        ),
    )


@pytest.mark.parametrize(
    "setting",
    [
        {"scale": (0.5, 0.6)},
        {"ratio": (1.0, 1.0)},
        {"horizontal_flip": 0.0},
        {"vertical_flip": 1.0},
        {"brightness": (1.0, 1.0)},
        {"contrast": (0.1, 0.2)},
        {"saturation": (1.0, 1.0)},
        {"hue": (0.0, 0.0)},
    ],
)
def test_changing_one_setting_does_not_shift_other_draws(setting):
    (changed,) = setting
    changed = {"scale": "crop", "ratio": "crop"}.get(changed, changed)
    for number in range(20):
        one, other = (
            each.draw(FIRST, str(number), HEIGHT, WIDTH)
            for each in (EVERYTHING, replace(EVERYTHING, **setting))
        )
        for name in ("crop", "horizontal_flip", "vertical_flip"):
            if name != changed:
                assert getattr(one, name) == getattr(other, name)
        assert [step for step in one.jitter if step[0] != changed] == [
            step for step in other.jitter if step[0] != changed
        ]


def test_draws_have_the_documented_distribution():
    count = 4000
    keys = map(str, range(count))
    drawn = [EVERYTHING.draw(FIRST, key, HEIGHT, WIDTH) for key in keys]
    for name in ("horizontal_flip", "vertical_flip"):
        flips = sum(getattr(each, name) for each in drawn)
        assert abs(flips - count / 2) < 4 * math.sqrt(count / 4)
    orders = Counter(tuple(n for n, _ in each.jitter) for each in drawn)
    assert_equal_frequencies(list(orders.values()), 24)
    for name in JITTER:
        amounts = [dict(each.jitter)[name] for each in drawn]
        assert_uniform(amounts, *getattr(EVERYTHING, name))


def test_crops_have_the_distribution_of_torchvision():
    # On a large square no attempt fails and rounding is negligible.
    augmentation = Augmentation(scale=(0.1, 0.5), ratio=(0.5, 2.0))
    side = 4000
    draws = [augmentation.draw(FIRST, str(n), side, side) for n in range(2000)]
    crops = [each.crop for each in draws]
    areas = [crop.height * crop.width / side**2 for crop in crops]
    assert_uniform(areas, 0.0999, 0.5001)
    ratios = [math.log2(crop.width / crop.height) for crop in crops]
    assert_uniform(ratios, -1.001, 1.001)
    tops = [crop.top / (side - crop.height) for crop in crops]
    assert_uniform(tops, 0, 1)


def assert_uniform(values, low, high):
    assert all(low <= value <= high for value in values)
    bins = Counter(
        min(int(20 * (value - low) / (high - low)), 19) for value in values
    )
    assert_equal_frequencies([bins[number] for number in range(20)], 20)


def assert_equal_frequencies(counts, num_bins):
    """Applies a chi-squared test."""
    assert len(counts) == num_bins
    expected = sum(counts) / num_bins
    squares = sum((count - expected) ** 2 for count in counts) / expected
    freedom = num_bins - 1
    assert squares < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("size", "ratio"),
    [
        ((3, 1000), (3 / 4, 4 / 3)),
        ((1000, 3), (3 / 4, 4 / 3)),
        ((500, 500), (1.0, 1.0)),
        ((301, 700), (0.5, 0.5)),
        ((90, 901), (0.1, 10.0)),
    ],
)
def test_crop_equals_torchvision_if_no_attempt_fits(size, ratio):
    some = Augmentation(scale=(1.0, 1.0), ratio=ratio)
    image = torch.empty(3, *size)
    torch.manual_seed(0)  # 2 % of others let an attempt fit
    expected = RandomResizedCrop.get_params(image, [1.0, 1.0], list(ratio))
    assert some.draw(FIRST, "k", *size).crop == Crop(*expected)


def test_crop_is_never_empty():
    for ratio, size, crop in (
        (10.0, (5, 1), Crop(2, 0, 1, 1)),
        (0.1, (1, 5), Crop(0, 2, 1, 1)),
    ):
        some = Augmentation(ratio=(ratio, ratio))
        assert some.draw(FIRST, "k", *size).crop == crop


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torchvision resizes floats here",
)
@settings(deadline=None, max_examples=60)
@given(
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    # torch 2.9 and 2.15 fail to resize some crops to one pixel.
    size=st.integers(2, 40),
    interpolation=st.sampled_from(
        ["nearest", "nearest-exact", "bilinear", "bicubic"]
    ),
    antialias=st.booleans(),
    key=st.text(),
)
def test_pixels_equal_torchvision(
    height, width, size, interpolation, antialias, key
):
    antialias = antialias and interpolation.startswith("bi")
    image = noise(height, width)
    drawn = EVERYTHING.draw(FIRST, key, height, width)
    crop = drawn.crop
    assert 0 <= crop.top <= height - crop.height
    assert 0 <= crop.left <= width - crop.width
    expected = functional.resized_crop(
        image,
        crop.top,
        crop.left,
        crop.height,
        crop.width,
        [size, size],
        InterpolationMode(interpolation),
        antialias,
    )
    if drawn.horizontal_flip:
        expected = functional.horizontal_flip(expected)
    if drawn.vertical_flip:
        expected = functional.vertical_flip(expected)
    without_colour = replace(drawn, jitter=())
    arguments = ((size, size), interpolation, antialias)
    assert torch.equal(without_colour.apply(image, *arguments), expected)
    for name, amount in drawn.jitter:
        step = replace(without_colour, jitter=((name, amount),))
        after = step.apply(image, *arguments)
        adjusted = getattr(functional, f"adjust_{name}")(expected, amount)
        # A fused operation of torchvision may round across an integer.
        tolerance = 1 if name in ("contrast", "saturation") else 0
        assert (after.int() - adjusted.int()).abs().max() <= tolerance


def test_few_pixels_differ_from_torchvision():
    image = photo()
    drawn = EVERYTHING.draw(FIRST, "k", HEIGHT, WIDTH)
    plain = replace(drawn, jitter=()).apply(
        image, (224, 224), "bilinear", True
    )
    for name, factor in product(("contrast", "saturation"), FACTORS):
        step = replace(drawn, jitter=((name, factor),))
        found = step.apply(image, (224, 224), "bilinear", True)
        expected = getattr(functional, f"adjust_{name}")(plain, factor)
        assert (found != expected).float().mean() < 0.02


def colour(image, *jitter):
    """Applies only steps of colour."""
    side = image.shape[-1]
    whole = Crop(0, 0, side, side)
    drawn = SampleAugmentation(whole, False, False, jitter)
    return drawn.apply(image, (side, side), "nearest", False)


def test_colour_steps_are_applied_in_the_order_drawn():
    image = photo()
    drawn = EVERYTHING.draw(FIRST, "k", HEIGHT, WIDTH)
    assert len(drawn.jitter) == 4
    options = ((64, 64), "bilinear", True)
    pixels = replace(drawn, jitter=()).apply(image, *options)
    for step in drawn.jitter:
        pixels = colour(pixels, step)
    assert torch.equal(drawn.apply(image, *options), pixels)


def test_hue_in_strips_equals_torchvision():
    image = noise(700, 700)
    expected = functional.adjust_hue(image, 0.2)
    assert torch.equal(colour(image, ("hue", 0.2)), expected)


def test_pixels_do_not_depend_on_threads_or_the_default_dtype():
    expected = pixels_digest()
    torch.set_num_threads(8)
    assert pixels_digest() == expected
    torch.set_default_dtype(torch.float64)
    try:
        assert pixels_digest() == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_pixels_do_not_depend_on_vector_instructions():
    result = subprocess.run(
        [sys.executable, "-c", PIXELS_PROGRAM.format(path=sys.path)],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == pixels_digest()


def test_sample_is_the_normalised_pixels():
    transform = ImageTransform(72, 64, augmentation=EVERYTHING)
    pixels = transform.training_pixels(photo(), "k", FIRST)
    expected = functional.normalize(
        pixels.float() / 255, list(transform.mean), list(transform.std)
    )
    sample = transform.sample(photo(), "k", FIRST)
    assert sample.dtype == torch.float32
    assert torch.equal(sample, expected)


def test_crop_of_augmentation_may_be_rectangular():
    stretched = ImageTransform((72, 72), 64, augmentation=EVERYTHING)
    shorter = ImageTransform(72, 64, augmentation=EVERYTHING)
    sample = stretched.sample(photo(), "k", FIRST)
    assert torch.equal(sample, shorter.sample(photo(), "k", FIRST))
    wide = ImageTransform((40, 80), (40, 80), augmentation=EVERYTHING)
    assert wide.sample(photo(), "k", FIRST).shape == wide.output_shape
    assert wide.output_shape == (3, 40, 80)


def test_augmentation_is_of_training_only():
    plain = ImageTransform(72, 64)
    augmented = replace(plain, augmentation=EVERYTHING)
    assert torch.equal(augmented.sample(photo(), "k", None), plain(photo()))
    assert torch.equal(augmented(photo()), plain(photo()))
    with pytest.raises(ValueError, match="no augmentation"):
        plain.sample(photo(), "k", FIRST)


def ranges(low, high):
    pairs = st.tuples(st.floats(low, high), st.floats(low, high))
    return pairs.map(lambda pair: (min(pair), max(pair)))


@given(
    augmentation=st.builds(
        Augmentation,
        scale=ranges(0.001, 1),
        ratio=ranges(0.1, 10),
        horizontal_flip=st.floats(0, 1),
        vertical_flip=st.floats(0, 1),
        brightness=ranges(0, 10),
        contrast=ranges(0, 10),
        saturation=ranges(0, 10),
        hue=ranges(-0.5, 0.5),
    ),
    word=st.text(),
)
def test_augmentation_survives_json_and_draws_within_its_ranges(
    augmentation, word
):
    transform = ImageTransform(30, 24, augmentation=augmentation)
    document = json.loads(json.dumps(transform.to_json()))
    assert ImageTransform.from_json(document) == transform
    for name, amount in augmentation.draw(FIRST, word, 30, 40).jitter:
        low, high = getattr(augmentation, name)
        assert low <= amount <= high


def test_integers_and_floats_give_the_same_json():
    whole = Augmentation(scale=(1, 1), hue=(0, 0), horizontal_flip=1)
    same = Augmentation(scale=(1.0, 1.0), hue=(0.0, 0.0), horizontal_flip=1.0)
    assert json.dumps(whole.to_json()) == json.dumps(same.to_json())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": [0, 1]}, "scale must begin above 0"),
        ({"scale": [0.5, 1.5]}, "scale must be two numbers"),
        ({"scale": [0.5, 0.4]}, "larger one second"),
        ({"scale": [0.5]}, "scale must be two numbers"),
        ({"scale": 0.5}, "scale must be two numbers"),
        ({"scale": [0.5, math.nan]}, "scale must be two numbers"),
        ({"scale": ["0.5", 1]}, "scale must be two numbers"),
        ({"scale": [True, 1]}, "scale must be two numbers"),
        ({"ratio": [0.01, 1]}, "ratio must be two numbers from 0.1 to 10"),
        ({"ratio": [1, 1e308]}, "ratio must be two numbers"),
        ({"brightness": [-0.1, 1]}, "brightness must be two numbers"),
        ({"contrast": [1, math.inf]}, "contrast must be two numbers"),
        ({"saturation": [1, 10**400]}, "saturation must be two numbers"),
        ({"hue": [-0.6, 0]}, "hue must be two numbers"),
        ({"horizontal_flip": 1.1}, "horizontal_flip must be a probability"),
        ({"horizontal_flip": True}, "horizontal_flip must be a probab"),
        ({"vertical_flip": None}, "vertical_flip must be a probability"),
        ({"vertical_flip": math.nan}, "vertical_flip must be a probab"),
        ({"code": "import os"}, "Augmentation is an object with the fields"),
    ],
)
def test_invalid_field_is_named(change, message):
    document = Augmentation().to_json() | change
    with pytest.raises(ValueError, match=message):
        Augmentation.from_json(document)


def test_augmentation_of_large_crops_is_refused():
    with pytest.raises(ValueError, match="1 to 2048 pixels with an augm"):
        ImageTransform(2304, (64, 2049), augmentation=Augmentation())
    assert ImageTransform(2304, 2049).augmentation is None
