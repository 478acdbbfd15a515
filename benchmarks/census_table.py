"""The census as reStructuredText."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Protocol

from benchmarks.rst import rst_table

_TITLES = {
    "torchvision": "torchvision",
    "timm": "timm",
    "transformers": "Hugging Face transformers",
}
_PACKAGES = ("torch", "torchvision", "timm", "transformers")
_HEADER = ("Model", "Parameters", "Pixels", "Frozen up to", "Cuts", "Equal")
_INTRODUCTION = """\
Models that can be split
========================

Each row is one run: the model is built with random weights, split at its
default freeze (the last linear layer, and less, is left to train), its
package is written and loaded again, and it is cut at five random places.
*Equal* says that the loaded package before the cut and the user's own model
behind it compute, with another batch size on each side, what the whole model
does, within a relative 1e-4 and 1e-5 of the largest output; otherwise it
names the operator or the reason.  *Pixels* is the height and width of the
images in that run: small where the architecture allows it, which changes no
operator.  The models of transformers are small ones of their architectures.
Nothing is downloaded.  The tables are written by

.. code-block:: console

   $ pip install -e '.[client,census]'
   $ python -m benchmarks.census --json census.json --rst docs/models.rst
"""


class Result(Protocol):
    """What the tables read of a row."""

    @property
    def key(self) -> str: ...
    @property
    def parameters(self) -> int: ...
    @property
    def pixels(self) -> int: ...
    @property
    def freeze(self) -> str: ...
    @property
    def cuts(self) -> int: ...
    @property
    def reason(self) -> str: ...


def write_rst(rows: Sequence[Result]) -> str:
    """The page: how to read it, then a table for each source."""
    return "\n".join([_INTRODUCTION, *_sections(rows)])


def _sections(rows: Sequence[Result]) -> Iterator[str]:
    versions = ", ".join(f"{p} {metadata.version(p)}" for p in _PACKAGES)
    equal = sum(not row.reason for row in rows)
    yield f"{equal} of {len(rows)} models can be split, with {versions}.\n"
    for source, title in _TITLES.items():
        found = [r for r in rows if r.key.partition("/")[0] == source]
        if found:
            yield f"{title}\n{'-' * len(title)}\n"
            yield rst_table(_HEADER, map(_cells, found))


def _cells(row: Result) -> Sequence[str]:
    return (
        f"``{row.key.partition('/')[2]}``",
        f"{row.parameters / 1e6:.1f} M",
        str(row.pixels),
        f"``{row.freeze}``" if row.freeze else "-",
        str(row.cuts or "-"),
        f"no: ``{_literal(row.reason)}``" if row.reason else "yes",
    )


def _literal(text: str) -> str:
    return text.replace("`", "'").strip()
