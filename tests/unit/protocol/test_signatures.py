"""Signatures of requests between filters, and the keys they need."""

from dataclasses import replace

import pytest

from hapi_protocol.signatures import (
    MAX_AGE_SECONDS,
    SignedRequest,
    Verifier,
    address_text,
    read_keys,
)

KEY, OTHER = b"k" * 32, b"o" * 32
NOW = 1_700_000_000.0
HERE = "10.0.0.1:6200"
REQUEST = SignedRequest(
    address=HERE,
    path="/d1/7/AUTH_a/c/o",
    step="job",
    version="1",
    policy_index="0",
    timestamp=str(NOW),
    nonce="n",
    message=b"{}",
)


class Seen:
    """Remembers signatures, as the table of a server's processes."""

    def __init__(self):
        self.until = {}

    def __call__(self, signature, until, now):
        is_new = self.until.get(signature, 0.0) <= now
        self.until[signature] = until
        return is_new


def problem(request, signature, keys=(KEY,), now=NOW, here=HERE, names=()):
    verifier = Verifier(keys, lambda: now, Seen(), names)
    return verifier.problem(request, signature, here)


def test_genuine_requests_pass_once():
    verifier = Verifier((OTHER, KEY), lambda: NOW, Seen())

    def check(request, key=KEY):
        return verifier.problem(request, request.signature(key), HERE)

    assert check(REQUEST) is None
    assert check(REQUEST) == "it is repeated"
    again = replace(REQUEST, nonce="m")
    assert check(again) is None
    assert check(again, OTHER) is None


def test_signatures_are_remembered_until_they_are_too_old():
    seen = Seen()
    for age in (-50.0, 0.0, 50.0):
        verifier = Verifier((KEY,), lambda age=age: NOW + age, seen)
        request = replace(REQUEST, nonce=str(age))
        signature = request.signature(KEY)
        assert verifier.problem(request, signature, HERE) is None
        assert seen.until[signature] == NOW + MAX_AGE_SECONDS


def test_request_for_another_server_is_refused():
    signature = REQUEST.signature(KEY)
    for here in ("10.0.0.2:6200", "10.0.0.1:6201", "store:6200"):
        found = problem(REQUEST, signature, here=here)
        assert HERE in found
        assert here in found
        assert "option addresses" in found
        assert problem(REQUEST, signature, here=here, names={HERE}) is None


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("10.0.0.1", "10.0.0.1:6200"),
        ("::ffff:10.0.0.1", "10.0.0.1:6200"),
        ("FD00::0001", "[fd00::1]:6200"),
        ("[fd00::1]", "[fd00::1]:6200"),
        ("store-1", "store-1:6200"),
    ],
)
def test_addresses_have_one_form(host, text):
    assert address_text(host, 6200) == text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("address", "10.0.0.2:6200"),
        ("path", "/d1/7/AUTH_a/c/other"),
        ("step", "model"),
        ("version", "2"),
        ("policy_index", "1"),
        ("timestamp", str(NOW + 1)),
        ("nonce", "m"),
        ("message", b"{ }"),
    ],
)
def test_signature_of_another_request_is_wrong(name, value):
    other = replace(REQUEST, **{name: value})
    assert "wrong" in problem(other, REQUEST.signature(KEY))


@pytest.mark.parametrize(
    ("request_", "signature", "words"),
    [
        (REQUEST, "", "wrong"),
        (REQUEST, "ü" * 64, "wrong"),
        (REQUEST, REQUEST.signature(OTHER), "wrong"),
        (replace(REQUEST, timestamp="soon"), "", "no number"),
        (replace(REQUEST, timestamp="nan"), "", "clocks"),
    ],
)
def test_other_signatures_are_refused(request_, signature, words):
    assert words in problem(request_, signature)


@pytest.mark.parametrize(
    "seconds", [-MAX_AGE_SECONDS - 1, MAX_AGE_SECONDS + 1]
)
def test_old_requests_are_refused(seconds):
    signature = REQUEST.signature(KEY)
    assert "clocks" in problem(REQUEST, signature, now=NOW + seconds)


def test_keys_of_a_file(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n\n" + OTHER + b"\n")
    path.chmod(0o600)
    assert read_keys(path) == [KEY, OTHER]


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (None, 0, "cannot be read"),
        (b"", 0o600, "has no key"),
        (b"short", 0o600, "key 1 has 5 bytes; at least 32"),
        (KEY + b"\nshort", 0o600, "key 2"),
        (KEY, 0o640, "chmod 600"),
        (KEY, 0o604, "chmod 600"),
    ],
)
def test_bad_keys_are_named_with_the_remedy(tmp_path, content, mode, words):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(ValueError, match=words) as caught:
        read_keys(path)
    assert str(path) in str(caught.value)
