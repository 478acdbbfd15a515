"""Requests and answers that the documentation shows, sent to a cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import requests

from caller import Caller
from documentation import Block

_REQUEST = re.compile(r"(GET|HEAD|POST|PUT|DELETE) /v1(\S+) HTTP/1\.1")
_ANSWER = re.compile(r"HTTP/1\.1 (\d{3}) .+")
_ANYTHING = "…"


@dataclass(frozen=True)
class Message:
    """The first line, the headers and the body of a block."""

    first: str
    headers: Mapping[str, str]
    body: str

    @classmethod
    def of(cls, block: Block) -> Message:
        head, _, body = block.text.partition("\n\n")
        first, *lines = head.splitlines()
        pairs = [line.partition(": ") for line in lines]
        return cls(first, {name: text for name, _, text in pairs}, body)


@dataclass(frozen=True)
class Exchange:
    """A request of one block and the answer of the next one."""

    asked: Block
    answered: Block

    def __str__(self) -> str:
        return str(self.asked)

    def check(self, caller: Caller, names: Mapping[str, str]) -> None:
        """Sends the request with the caller's token and compares.

        An ellipsis in the answer stands for anything.

        Args:
            names: what words of the request stand for here.
        """
        text = self.asked.text
        for theirs, ours in names.items():
            text = text.replace(theirs, ours)
        asked = Message.of(Block(*self._place, "http", text))
        method, path = _matched(_REQUEST, asked.first).groups()
        headers = dict(asked.headers)
        headers.pop("X-Auth-Token")  # the caller has its own
        found = caller.request(method, path, headers, asked.body.encode())
        self._compare(found)

    @property
    def _place(self) -> tuple[str, int]:
        return self.asked.page, self.asked.line

    def _compare(self, found: requests.Response) -> None:
        told = Message.of(self.answered)
        status = int(_matched(_ANSWER, told.first)[1])
        assert found.status_code == status, (str(self), found.text)
        for name, text in told.headers.items():
            assert _alike(text, found.headers[name]), (name, found.headers)
        if told.body.strip():
            assert _alike(told.body.strip(), found.text.strip()), found.text


def exchanges_of(blocks: Sequence[Block]) -> list[Exchange]:
    """Pairs of blocks: a request, and behind it its answer."""
    pairs = zip(blocks[::2], blocks[1::2], strict=True)
    return [Exchange(asked, answered) for asked, answered in pairs]


def _matched(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    found = pattern.fullmatch(text)
    assert found, f"{text!r} is not {pattern.pattern}"
    return found


def _alike(told: str, found: str) -> bool:
    parts = map(re.escape, " ".join(told.split()).split(_ANYTHING))
    return bool(re.fullmatch(".*".join(parts), " ".join(found.split())))
