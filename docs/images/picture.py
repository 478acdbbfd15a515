"""A minimal SVG canvas for the pictures of the documentation."""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.sax.saxutils import escape

FONT = "DejaVu Sans, Verdana, Arial, sans-serif"
HALO = 'paint-order="stroke" stroke="#ffffff" stroke-width="6" '
"""White outline that separates text from lines behind it."""
INK = "#1b1f24"
SOFT = "#57606a"
CARD = "#ffffff"
EDGE = "#d0d7de"
STORAGE = ("#dbeafe", "#1d4ed8")
CLIENT = ("#ffedd5", "#c2410c")
PLAIN = ("#f1f3f5", "#868e96")
OURS = ("#dcfce7", "#15803d")
SIZE = 14
LINE = 19


@dataclass
class Picture:
    """An SVG under construction; ``parts`` are drawn in order."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colours: tuple[str, str] = PLAIN,
        *,
        dashed: bool = False,
    ) -> None:
        fill, stroke = colours
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" '
            f'height="{height:g}" rx="6" fill="{fill}" stroke="{stroke}" '
            f'stroke-width="1.5"{dashes}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        *lines: str,
        anchor: str = "middle",
        colour: str = INK,
        size: int = SIZE,
        bold: bool = False,
        halo: bool = False,
    ) -> None:
        """Adds lines of text; the baseline of the first one is ``y``."""
        for number, line in enumerate(lines):
            self.parts.append(
                f'<text x="{x:g}" y="{y + number * LINE:g}" '
                f'text-anchor="{anchor}" font-size="{size}" '
                f'font-family="{FONT}" '
                + ('font-weight="bold" ' if bold else "")
                + (HALO if halo else "")
                + f'fill="{colour}">{escape(line)}</text>'
            )

    def label(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *lines: str,
        colours: tuple[str, str] = PLAIN,
        bold: bool = False,
    ) -> None:
        """Adds a box with centred lines; the first one is its name."""
        self.box(x, y, width, height, colours)
        top = y + height / 2 - LINE * (len(lines) - 1) / 2 + 5
        self.text(x + width / 2, top, lines[0], bold=bold or len(lines) > 1)
        self.text(x + width / 2, top + LINE, *lines[1:], colour=SOFT, size=13)

    def arrow(
        self,
        *points: tuple[float, float],
        colour: str = INK,
        both: bool = False,
        dashed: bool = False,
    ) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashes = ' stroke-dasharray="4 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" '
            f'stroke-width="1.8"{dashes}/>'
        )
        self._head(points[-2], points[-1], colour)
        if both:
            self._head(points[1], points[0], colour)

    def _head(
        self,
        before: tuple[float, float],
        tip: tuple[float, float],
        colour: str,
    ) -> None:
        x, y = tip
        right = (x > before[0]) - (x < before[0])
        down = (y > before[1]) - (y < before[1])
        back = [
            (x - 9 * right + 5 * down * side, y - 9 * down + 5 * right * side)
            for side in (-1, 1)
        ]
        corners = " ".join(f"{a:g},{b:g}" for a, b in [tip, *back])
        self.parts.append(f'<polygon points="{corners}" fill="{colour}"/>')

    def line(
        self, x1: float, y1: float, x2: float, y2: float, colour: str = EDGE
    ) -> None:
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" '
            f'stroke="{colour}" stroke-width="1.5" stroke-dasharray="3 4"/>'
        )

    def svg(self) -> str:
        head = (
            '<svg xmlns="http://www.w3.org/2000/svg" '
            f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img">'
        )
        card = (
            f'<rect x="0.5" y="0.5" width="{self.width - 1}" '
            f'height="{self.height - 1}" rx="8" fill="{CARD}" '
            f'stroke="{EDGE}"/>'
        )
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join([head, title, card, *self.parts, "</svg>"]) + "\n"
