"""Numbers as people read them."""

import pytest

from hapi_splitter.units import (
    bytes_text,
    count_text,
    link_text,
    number_text,
    percent_text,
    seconds_text,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number_text(15_432.4), "15,432"),
        (number_text(0.012345), "0.0123"),
        (number_text(float("inf")), "∞"),
        (count_text(1, "image"), "1 image"),
        (count_text(1200, "class", "classes"), "1,200 classes"),
        (bytes_text(999.7), "1 kB"),
        (bytes_text(33_100), "33.1 kB"),
        (link_text(12.5e6), "100 Mbit/s"),
        (seconds_text(0), "0 s"),
        (seconds_text(0.00125), "1.25 ms"),
        (seconds_text(3e-10), "0.3 ns"),
        (seconds_text(120), "2 min"),
        (seconds_text(7200), "2 h"),
        (percent_text(0), "0 %"),
        (percent_text(0.0001), "<0.1 %"),
        (percent_text(0.004), "0.4 %"),
        (percent_text(0.9999), "99.9 %"),
        (percent_text(1), "100 %"),
    ],
)
def test_number_is_rounded_and_has_a_unit(text, expected):
    assert text == expected
