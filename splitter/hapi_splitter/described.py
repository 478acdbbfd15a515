"""``Described``: an object's facts as people read them, also in notebooks."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Mapping


class Described(ABC):
    """Has a ``repr`` of a few lines, and in notebooks a table."""

    @abstractmethod
    def describe(self) -> Mapping[str, str]:
        """Returns what is worth knowing, by name."""

    def __repr__(self) -> str:
        lines = (f"  {name}: {fact}" for name, fact in self.describe().items())
        return "\n".join([type(self).__name__, *lines])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(fact)}</td></tr>"
            for name, fact in self.describe().items()
        )
        name = html.escape(type(self).__name__)
        return f"<table><caption>{name}</caption>{rows}</table>"
