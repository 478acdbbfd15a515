"""Draws the pictures of the documentation: ``python docs/images/draw.py``.

Each picture is an SVG of rectangles, lines and text on a light card, readable
on light and dark pages.  A test compares the committed files with the output.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from picture import CLIENT, EDGE, INK, OURS, PLAIN, SOFT, STORAGE, Picture


def architecture() -> Picture:
    """Draws the two tiers, their processes and the messages."""
    picture = Picture(840, 550, "The two tiers and their processes")
    picture.text(150, 34, "Training job", bold=True, size=16)
    picture.text(585, 34, "Proxy host of Swift", bold=True, size=16)
    picture.box(20, 48, 260, 320, ("#fff8f0", CLIENT[1]), dashed=True)
    picture.text(150, 72, "one Python process", colour=SOFT, size=13)
    for y, *lines in (
        (84, "hapi_client", "plans, fetches, retries"),
        (160, "frozen layers after the cut", "no gradients"),
        (236, "tail: your nn.Module", "your loop, your optimizer"),
    ):
        picture.label(40, y, 220, 58, *lines, colours=CLIENT)
    picture.arrow((150, 142), (150, 160))
    picture.arrow((150, 218), (150, 236))
    picture.text(150, 326, "images or features arrive,", size=13, colour=SOFT)
    picture.text(150, 345, "only the tail is trained", size=13, colour=SOFT)

    picture.box(350, 48, 470, 320, ("#f6f9ff", STORAGE[1]), dashed=True)
    picture.text(
        585, 72, "proxy-server (eventlet, no torch)", size=13, colour=SOFT
    )
    picture.label(366, 84, 78, 58, "auth", "s3api …")
    picture.label(470, 84, 104, 58, "hapi", "the filter", colours=OURS)
    picture.label(694, 84, 112, 58, "copy … slo …", "proxy app")
    picture.arrow((444, 113), (470, 113), both=True)
    picture.arrow((574, 104), (694, 104), both=True)
    _worker(picture, 366, 276)
    picture.arrow((512, 142), (512, 276), both=True, colour=OURS[1])
    for number, text in enumerate(("bytes down,", "features up")):
        y = 206 + 19 * number
        picture.text(502, y, text, anchor="end", size=13, colour=SOFT)

    picture.box(350, 400, 470, 132, ("#f6f9ff", STORAGE[1]), dashed=True)
    picture.text(585, 520, "Host of an object server", bold=True, size=16)
    _worker(picture, 366, 416)
    picture.label(660, 416, 146, 76, "object-server", "hapi_object", "disks")
    picture.arrow((630, 454), (660, 454), both=True, colour=OURS[1])
    picture.arrow(
        (574, 126), (676, 126), (676, 416), both=True, colour=OURS[1]
    )
    for number, text in enumerate(("or: jobs", "down,", "features", "up")):
        y = 190 + 19 * number
        picture.text(666, y, text, anchor="end", size=13, colour=SOFT)
    picture.arrow((750, 142), (750, 416), both=True)
    picture.text(760, 390, "objects", anchor="start", size=13, colour=SOFT)
    picture.arrow((260, 104), (366, 104), colour=CLIENT[1])
    picture.text(315, 97, "GET", size=13, colour=CLIENT[1])
    picture.arrow((366, 124), (260, 124), colour=STORAGE[1])
    picture.text(315, 143, "stream", size=13, colour=STORAGE[1])
    return picture


def _worker(picture: Picture, x: float, y: float) -> None:
    picture.label(
        x,
        y,
        264,
        76,
        "hapi-worker (torch)",
        "decode → layers before the cut",
        "owns GPUs or cores; no credentials",
        colours=OURS,
    )


STEPS = (
    ("client", "filter", "GET of a shard, X-Hapi-*"),
    ("filter", "swift", "HEAD of shard and package, with the caller's rights"),
    ("filter", "worker", "POST /jobs: request, charged account"),
    ("worker", "filter", "201 grant, or 409 model_needed"),
    ("filter", "swift", "if needed: GET of the package"),
    ("filter", "worker", "and PUT /models"),
    ("filter", "swift", "GET of the samples' range in the shard"),
    ("filter", "worker", "POST /jobs/<id>: bytes, as they arrive"),
    ("worker", "filter", "features, as they are computed"),
    ("filter", "client", "200, rows and a summary"),
)
IF_NEEDED = (5, 6)


def annotated_get() -> Picture:
    """Draws one request, from top to bottom."""
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
    """Draws three cuts of one model and the tier of each part."""
    picture = Picture(800, 450, "Three cuts of one model")
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
        "frozen: the same features in every epoch",
        size=13,
        colour=SOFT,
    )
    picture.text(tail[1] + 32, 76, "trained", size=13, colour=SOFT)
    rows = (
        (98, "cut 0", "streaming", 0, "the stored image"),
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
    picture.text(214, 428, "on the client", anchor="start", size=13)
    return picture


ROUTES: Mapping[str, tuple[str, str, Mapping[str, float]]] = MappingProxyType(
    {
        "stream all": (
            "100 samples/s",
            "the client's device limits",
            {"link": 0.23, "storage device": 0.0, "client device": 1.0},
        ),
        "push down all": (
            "50 samples/s",
            "the storage device limits",
            {"link": 0.01, "storage device": 1.0, "client device": 0.0},
        ),
        "the plan: 2 of 3 streamed": (
            "150 samples/s",
            "both are fully used",
            {"link": 0.24, "storage device": 1.0, "client device": 1.0},
        ),
    }
)
"""Utilisation of each resource by plan, for a client that computes 100 images
per second, a storage side that computes 50, images of 115 KB, features of 2 KB
and a link of 50 MB/s."""


def plan() -> Picture:
    """Draws the utilisation of each resource by streaming, push-down, mix."""
    picture = Picture(800, 400, "Utilisation of each resource by plan")
    picture.text(
        20,
        32,
        "Utilisation of each resource",
        anchor="start",
        bold=True,
        size=16,
    )
    picture.text(
        780,
        32,
        "a resource at 100 % limits the speed",
        anchor="end",
        size=13,
        colour=SOFT,
    )
    colours = {
        "link": PLAIN,
        "storage device": STORAGE,
        "client device": CLIENT,
    }
    for number, (name, (speed, why, busy)) in enumerate(ROUTES.items()):
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
        if number < len(ROUTES) - 1:
            picture.line(20, top + 100, 780, top + 100)
    picture.text(
        20,
        388,
        "Example: the client computes 100 images/s, the storage side 50; "
        "images 115 KB, features 2 KB, link 50 MB/s.",
        anchor="start",
        size=13,
        colour=SOFT,
    )
    return picture


def placement() -> Picture:
    """Draws the processes on each kind of host."""
    picture = Picture(800, 400, "Processes on each kind of host")
    picture.label(20, 20, 760, 40, "clients, and a load balancer", bold=True)
    hosts = (
        ("proxy and storage", "proxy-server", "object-server"),
        ("proxy only", "proxy-server", ""),
        ("storage only", "", "object-server"),
    )
    for number, (name, proxy, storage) in enumerate(hosts):
        x = 20 + 262 * number
        middle = x + 118
        picture.box(x, 96, 236, 286, ("#f6f9ff", STORAGE[1]), dashed=True)
        picture.text(middle, 369, name, bold=True)
        boxes = [(212, "hapi-worker", "on GPUs or cores")]
        if proxy:
            picture.arrow((middle, 60), (middle, 112), both=True)
            picture.arrow(
                (middle, 164), (middle, 212), both=True, colour=OURS[1]
            )
            boxes.append((112, proxy, "… auth hapi copy …"))
        if storage:
            picture.arrow(
                (middle, 264), (middle, 290), both=True, colour=OURS[1]
            )
            boxes.append((290, storage, "… recon hapi_object"))
        for y, *lines in boxes:
            picture.label(x + 16, y, 204, 52, *lines, colours=OURS)
    return picture


RECORD = "two-cores.json"
NETWORKS = {
    "mobilenet_v3_small": ("MobileNetV3-Small", "#c2410c"),
    "resnet18": ("ResNet-18", "#1d4ed8"),
    "vit_b_16": ("ViT-B/16, 112 px", "#15803d"),
}
LINKS = (0.1, 0.25, 1.0, 10.0)
TICKS = (0.5, 1, 2, 4, 8)
PANELS = (
    ("backbone", "all layers but the head frozen"),
    ("inner", "half of the layers frozen"),
)


def speedup() -> Picture:
    """Draws the measured speed-up of a job over the best opponent, by link."""
    (record,) = Path(__file__).parents[2].glob(f"benchmarks/*/{RECORD}")
    cells = json.loads(record.read_text())["experiments"]["grid"]["cells"]
    picture = Picture(800, 400, "Speed-up over the fastest alternative")
    picture.text(
        20,
        32,
        "Samples per second, relative to the fastest alternative",
        anchor="start",
        bold=True,
        size=16,
    )
    for number, (freeze, title) in enumerate(PANELS):
        left = 60 + 380 * number
        _axes(picture, left, title)
        for model, (_, colour) in NETWORKS.items():
            of_line = {
                cell["link"]: cell["ratio"]
                for cell in cells
                if (cell["model"], cell["freeze"]) == (model, freeze)
            }
            _line(picture, left, of_line, colour)
    for number, (name, colour) in enumerate(NETWORKS.values()):
        x = 60 + 200 * number
        picture.box(x, 370, 14, 14, (colour, colour))
        picture.text(x + 22, 382, name, anchor="start", size=13)
    picture.text(
        780,
        382,
        "bars: 95 % intervals",
        anchor="end",
        size=13,
        colour=SOFT,
    )
    return picture


def _height(ratio: float) -> float:
    low, high = math.log(TICKS[0]), math.log(12)
    return 300 - 220 * (math.log(ratio) - low) / (high - low)


def _axes(picture: Picture, left: float, title: str) -> None:
    picture.text(left + 160, 64, title, size=13, bold=True)
    for tick in TICKS:
        y = _height(tick)
        picture.line(left, y, left + 320, y, SOFT if tick == 1 else EDGE)
        picture.text(left - 8, y + 4, f"{tick:g}x", anchor="end", size=13)
    for number, link in enumerate(LINKS):
        x = left + 40 + 80 * number
        picture.text(x, 320, f"{link:g}", size=13)
    picture.text(
        left + 160,
        344,
        "link rate; 1 = what one core of a tar stream uses",
        size=13,
        colour=SOFT,
    )


def _line(
    picture: Picture,
    left: float,
    ratios: Mapping[float, Mapping[str, Any]],
    colour: str,
) -> None:
    points = []
    for number, link in enumerate(LINKS):
        x = left + 40 + 80 * number
        low, high = ratios[link]["interval"]
        y = _height(ratios[link]["median"])
        points.append(f"{x:g},{y:.1f}")
        picture.parts.append(
            f'<line x1="{x:g}" y1="{_height(low):.1f}" x2="{x:g}" '
            f'y2="{_height(high):.1f}" stroke="{colour}" stroke-width="3"/>'
        )
        picture.parts.append(
            f'<circle cx="{x:g}" cy="{y:.1f}" r="4.5" fill="{colour}"/>'
        )
    picture.parts.append(
        f'<polyline points="{" ".join(points)}" fill="none" '
        f'stroke="{colour}" stroke-width="2"/>'
    )


PICTURES: Mapping[str, Callable[[], Picture]] = MappingProxyType(
    {
        "annotated-get.svg": annotated_get,
        "architecture.svg": architecture,
        "cut.svg": cut,
        "placement.svg": placement,
        "plan.svg": plan,
        "speedup.svg": speedup,
    }
)


def main() -> None:
    """Writes all pictures next to this file."""
    for name, draw in PICTURES.items():
        (Path(__file__).parent / name).write_text(draw().svg())


if __name__ == "__main__":
    main()
