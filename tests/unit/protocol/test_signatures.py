"""Signatures of requests between filters, and the keys they need."""

from dataclasses import replace

import pytest

from hapi_protocol.signatures import (
    MAX_AGE_SECONDS,
    SignedRequest,
    Verifier,
    read_keys,
)

KEY, OTHER = b"k" * 32, b"o" * 32
NOW = 1_700_000_000.0
REQUEST = SignedRequest(
    path="/d1/7/AUTH_a/c/o",
    step="job",
    version="1",
    policy_index="0",
    timestamp=str(NOW),
    nonce="n",
    message=b"{}",
)


def problem(request, signature, keys=(KEY,), now=NOW):
    return Verifier(keys, lambda: now).problem(request, signature)


def test_genuine_requests_pass_once():
    verifier = Verifier((OTHER, KEY), lambda: NOW)
    assert verifier.problem(REQUEST, REQUEST.signature(KEY)) is None
    assert (
        verifier.problem(REQUEST, REQUEST.signature(KEY)) == "it is repeated"
    )
    again = replace(REQUEST, nonce="m")
    assert verifier.problem(again, again.signature(KEY)) is None
    assert verifier.problem(again, again.signature(OTHER)) is None


def test_signatures_are_forgotten_when_they_are_too_old():
    times = [NOW]
    verifier = Verifier((KEY,), lambda: times[0])
    for number in range(3):
        times[0] = NOW + 150 * number
        request = replace(REQUEST, timestamp=str(times[0]))
        assert verifier.problem(request, request.signature(KEY)) is None
        assert len(verifier._seen) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
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
