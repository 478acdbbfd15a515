"""Text of strangers on logs and terminals."""

import io
import logging

import pytest

from hapi_protocol.printable import LineFormatter, printable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train/Müller 日本.tar", "train/Müller 日本.tar"),
        ("a\nERROR x: forged", r"a\nERROR x: forged"),
        ("\x1b[31mred\r", r"\x1b[31mred\r"),
        ("\x7f\x9b1m", r"\x7f\x9b1m"),
        ("up\u2028down \u202egpj.exe", r"up\u2028down \u202egpj.exe"),
        ("\udcff", r"\udcff"),
    ],
)
def test_other_characters_are_escaped(text, expected):
    assert printable(text) == expected
    expected.encode()


def test_name_forges_no_line_of_a_log():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.Logger("hapi_worker")
    logger.addHandler(handler)
    name = "m.hapi\nERROR hapi_worker: no device is left\x1b[2J"
    logger.info("model %s", name)
    try:
        raise ValueError(name)
    except ValueError:
        logger.exception("a defect: %s", name)
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue()
    assert [line.split()[0] for line in lines if line[0] != " "] == [
        "INFO",
        "ERROR",
    ]
    assert any("ValueError: m.hapi" in line for line in lines)
