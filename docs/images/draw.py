"""Draws the documentation's pictures: ``python docs/images/draw.py``.

Each is an SVG of rectangles, lines and text on a light card, so that it can be
read on light and on dark pages.  A test compares what is committed with what
this writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from xml.sax.saxutils import escape

FONT = "DejaVu Sans, Verdana, Arial, sans-serif"
HALO = 'paint-order="stroke" stroke="#ffffff" stroke-width="6" '
"""Keeps lines away from the letters in front of them."""
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
    """What is drawn so far, back to front."""

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
        """Lines of text, the first one's base at ``y``."""
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
        """A box with lines in its middle; the first one is its name."""
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


def architecture() -> Picture:
    """Two tiers, their processes, and what is between them."""
    picture = Picture(800, 390, "The two tiers and their processes")
    picture.text(150, 34, "Training job", bold=True, size=16)
    picture.text(560, 34, "Storage host", bold=True, size=16)
    picture.box(20, 48, 260, 320, ("#fff8f0", CLIENT[1]), dashed=True)
    picture.text(150, 72, "one Python process", colour=SOFT, size=13)
    for y, *lines in (
        (84, "hapi_client", "plans, fetches, retries"),
        (160, "rest of the frozen layers", "after the cut, no gradients"),
        (236, "tail: your nn.Module", "your loop, your optimizer"),
    ):
        picture.label(40, y, 220, 58, *lines, colours=CLIENT)
    picture.arrow((150, 142), (150, 160))
    picture.arrow((150, 218), (150, 236))
    picture.text(150, 326, "images or features come in,", size=13, colour=SOFT)
    picture.text(150, 345, "the tail alone is trained", size=13, colour=SOFT)

    picture.box(350, 48, 430, 320, ("#f6f9ff", STORAGE[1]), dashed=True)
    picture.text(
        565, 72, "proxy-server (eventlet, no torch)", size=13, colour=SOFT
    )
    picture.label(366, 84, 78, 58, "auth", "s3api …")
    picture.label(470, 84, 104, 58, "hapi", "the filter", colours=OURS)
    picture.label(608, 84, 158, 58, "copy … slo …", "proxy app")
    picture.arrow((444, 113), (470, 113), both=True)
    picture.arrow((574, 113), (608, 113), both=True)
    picture.label(608, 190, 158, 58, "object servers", "replicas or EC")
    picture.arrow((687, 142), (687, 190), both=True)
    picture.arrow((522, 142), (522, 268), both=True, colour=OURS[1])
    picture.text(512, 200, "unix socket", anchor="end", colour=OURS[1])
    picture.text(512, 219, "bytes down,", anchor="end", size=13, colour=SOFT)
    picture.text(512, 238, "features up", anchor="end", size=13, colour=SOFT)
    picture.label(
        366,
        268,
        400,
        84,
        "hapi-worker (torch)",
        "decode → batch → layers before the cut → encode",
        "owns GPUs or cores; no credentials, no network",
        colours=OURS,
    )
    picture.arrow((260, 104), (366, 104), colour=CLIENT[1])
    picture.text(315, 97, "GET", size=13, colour=CLIENT[1])
    picture.arrow((366, 124), (260, 124), colour=STORAGE[1])
    picture.text(315, 143, "stream", size=13, colour=STORAGE[1])
    return picture


STEPS = (
    ("client", "filter", "GET of a shard, X-Hapi-*"),
    ("filter", "swift", "HEAD of shard and package, with the caller's rights"),
    ("filter", "worker", "POST /jobs: what is wanted, who pays"),
    ("worker", "filter", "201 grant, or 409 model_needed"),
    ("filter", "swift", "where it is needed: GET of the package"),
    ("filter", "worker", "and PUT /models"),
    ("filter", "swift", "GET of the samples' range in the shard"),
    ("filter", "worker", "POST /jobs/<id>: bytes, as they come"),
    ("worker", "filter", "features, as they are computed"),
    ("filter", "client", "200, rows and a summary"),
)
IF_NEEDED = (5, 6)


def annotated_get() -> Picture:
    """One request, from top to bottom."""
    picture = Picture(800, 560, "One annotated GET, step by step")
    columns = {"client": 80, "filter": 310, "swift": 715, "worker": 570}
    names = {
        "client": ("hapi_client", CLIENT),
        "filter": ("hapi filter", OURS),
        "swift": ("rest of Swift", PLAIN),
        "worker": ("hapi-worker", OURS),
    }
    for who, x in columns.items():
        name, colours = names[who]
        picture.line(x, 54, x, 544)
        picture.label(x - 65, 20, 130, 34, name, colours=colours, bold=True)
    for number, (sender, receiver, text) in enumerate(STEPS, 1):
        y = 58 + 46 * number
        start, end = columns[sender], columns[receiver]
        left = min(start, end)
        picture.text(
            left + 12,
            y - 7,
            f"{number}. {text}",
            anchor="start",
            size=13,
            halo=True,
        )
        picture.arrow((start, y), (end, y), dashed=number in IF_NEEDED)
    return picture


def cut() -> Picture:
    """Where a model is cut, and which part runs where."""
    picture = Picture(800, 450, "Where a model is cut, and what runs where")
    x = 130
    blocks = []
    for name, width in (
        ("decode", 74),
        ("conv1", 62),
        ("layer1", 66),
        ("layer2", 66),
        ("layer3", 66),
        ("layer4", 66),
        ("avgpool", 78),
    ):
        blocks.append((name, x, width))
        x += width + 8
    tail = ("fc", x + 22, 64)
    picture.text(20, 40, "the model", anchor="start", bold=True)
    for name, left, width in blocks:
        picture.label(left, 20, width, 34, name)
    picture.label(tail[1], 20, tail[2], 34, tail[0], colours=CLIENT)
    end = blocks[-1][1] + blocks[-1][2]
    picture.line(end + 15, 14, end + 15, 416, CLIENT[1])
    picture.text(end + 15, 434, "freeze point", size=13, colour=CLIENT[1])
    picture.text(
        (130 + end) / 2,
        76,
        "frozen: the same for an image in every epoch",
        size=13,
        colour=SOFT,
    )
    picture.text(tail[1] + 32, 76, "trained", size=13, colour=SOFT)
    rows = (
        (98, "cut 0", "streaming", 0, "the image, as it is stored"),
        (200, "cut k", "an inner cut", 4, "features of layer2"),
        (302, "cut n", "the last cut", 7, "features of avgpool"),
    )
    for y, name, what, pushed, crosses in rows:
        picture.text(20, y + 22, name, anchor="start", bold=True)
        picture.text(20, y + 41, what, anchor="start", size=13, colour=SOFT)
        for number, (_, left, width) in enumerate(blocks):
            where = STORAGE if number < pushed else CLIENT
            picture.box(left, y + 8, width, 30, where)
        picture.box(tail[1], y + 8, tail[2], 30, CLIENT)
        gap = (
            blocks[pushed - 1][1] + blocks[pushed - 1][2] + 4
            if pushed
            else 126
        )
        picture.arrow((gap, y + 4), (gap, y + 62), colour=INK)
        anchor = "end" if pushed == len(blocks) else "start"
        picture.text(
            gap + (6 if anchor == "end" else -6),
            y + 79,
            f"over the network: {crosses}",
            anchor=anchor,
            size=13,
        )
    picture.box(20, 414, 18, 18, STORAGE)
    picture.text(44, 428, "next to the data", anchor="start", size=13)
    picture.box(190, 414, 18, 18, CLIENT)
    picture.text(214, 428, "where you train", anchor="start", size=13)
    return picture


WAYS: Mapping[str, tuple[str, str, Mapping[str, float]]] = MappingProxyType(
    {
        "stream all": (
            "100 samples/s",
            "your device is the slowest",
            {"link": 0.23, "storage device": 0.0, "your device": 1.0},
        ),
        "push all": (
            "50 samples/s",
            "the store's device is the slowest",
            {"link": 0.01, "storage device": 1.0, "your device": 0.0},
        ),
        "the plan: 2 of 3 streamed": (
            "150 samples/s",
            "both work all the time",
            {"link": 0.24, "storage device": 1.0, "your device": 1.0},
        ),
    }
)
"""Of a client with 100 images a second and a store with 50, images of 115 KB,
features of 2 KB, a link of 50 MB/s: how busy each resource is."""


def plan() -> Picture:
    """What a plan weighs, and why a mix beats each single choice."""
    picture = Picture(800, 400, "What a plan weighs")
    picture.text(
        20,
        32,
        "How busy is each resource?",
        anchor="start",
        bold=True,
        size=16,
    )
    picture.text(
        780,
        32,
        "100 % busy limits the speed",
        anchor="end",
        size=13,
        colour=SOFT,
    )
    colours = {
        "link": PLAIN,
        "storage device": STORAGE,
        "your device": CLIENT,
    }
    for number, (name, (speed, why, busy)) in enumerate(WAYS.items()):
        top = 54 + 112 * number
        picture.text(20, top + 22, name, anchor="start", bold=True)
        picture.text(20, top + 46, speed, anchor="start", size=16)
        picture.text(20, top + 68, why, anchor="start", size=13, colour=SOFT)
        for row, (resource, share) in enumerate(busy.items()):
            y = top + 6 + 28 * row
            picture.text(390, y + 16, resource, anchor="end", size=13)
            picture.box(400, y, 300, 22, ("#ffffff", EDGE))
            if share:
                picture.box(400, y, max(300 * share, 4), 22, colours[resource])
            picture.text(
                710,
                y + 16,
                f"{100 * share:.0f} %",
                anchor="start",
                size=13,
                bold=share == 1.0,
            )
        if number < len(WAYS) - 1:
            picture.line(20, top + 100, 780, top + 100)
    picture.text(
        20,
        388,
        "An example: you compute 100 images a second, the store 50; images "
        "115 KB, features 2 KB, link 50 MB/s.",
        anchor="start",
        size=13,
        colour=SOFT,
    )
    return picture


def placement() -> Picture:
    """Which host gets what."""
    picture = Picture(800, 400, "What runs where")
    picture.label(20, 20, 760, 40, "clients, and a load balancer", bold=True)
    hosts = (
        ("proxy and storage, GPU", True, True, "on the GPUs"),
        ("proxy only, no GPU", True, False, "on cores"),
        ("storage only", False, True, None),
    )
    for number, (name, proxy, storage, device) in enumerate(hosts):
        x = 20 + 262 * number
        picture.box(x, 96, 236, 286, ("#f6f9ff", STORAGE[1]), dashed=True)
        picture.text(x + 118, 366, name, bold=True)
        if proxy:
            picture.arrow((x + 118, 60), (x + 118, 112), both=True)
            picture.label(
                x + 16,
                112,
                204,
                52,
                "proxy-server",
                "… auth hapi copy …",
                colours=OURS,
            )
        if device:
            picture.arrow(
                (x + 118, 164), (x + 118, 212), both=True, colour=OURS[1]
            )
            picture.text(
                x + 128,
                193,
                "unix socket",
                anchor="start",
                size=13,
                colour=OURS[1],
            )
            picture.label(
                x + 16, 212, 204, 52, "hapi-worker", device, colours=OURS
            )
        if storage:
            picture.label(
                x + 16, 284, 204, 52, "object servers", "account, container"
            )
        if not proxy:
            picture.text(x + 118, 190, "nothing to install", colour=SOFT)
    return picture


PICTURES: Mapping[str, Callable[[], Picture]] = MappingProxyType(
    {
        "annotated-get.svg": annotated_get,
        "architecture.svg": architecture,
        "cut.svg": cut,
        "placement.svg": placement,
        "plan.svg": plan,
    }
)


def main() -> None:
    """Writes all pictures beside this file."""
    for name, draw in PICTURES.items():
        (Path(__file__).parent / name).write_text(draw().svg())


if __name__ == "__main__":
    main()
