"""A neighbour's waiting times while another account sends dear images.

    python -m benchmarks.attacks --json attacks.json

In each round one account keeps four streams busy with images that are made to
cost time or memory, and another sends eight small photographs again and again.
The worker has this host's cores, shared with both clients.  The goal is that
99 of 100 of its requests take less than a second.
"""

from __future__ import annotations

import argparse
import io
import struct
import sys
import tarfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.command_line import (
    exit_status,
    parse,
    parser_of,
    print_goals,
    print_table,
)
from benchmarks.record import write_results
from benchmarks.testbed.worker_process import (
    package_model,
    running_worker,
    stream_client,
    temporary_folder,
)

SECONDS, QUICK_SECONDS = 15.0, 2.0
WARM_SECONDS = 3.0
QUESTION_SECONDS = 600.0
SIDE, QUICK_SIDE = 8000, 1000
STREAMS = 4
GOAL_SECONDS = 1.0


def _file(image: Image.Image, kind: str, **options: Any) -> bytes:
    image.save(sink := io.BytesIO(), kind, **options)
    return sink.getvalue()


def _with_parts(image: bytes, start: int, part: bytes, number: int) -> bytes:
    return image[:start] + part * number + image[start:]


def _strips(number: int) -> bytes:
    """A TIFF of one row of one byte a strip (TIFF 6.0, section 2)."""
    tags = [
        *((256, 1), (257, number), (258, 8), (259, 1), (262, 1)),
        *((273, 0), (277, 1), (278, 1), (279, 0)),
    ]
    after = 8 + 2 + 12 * len(tags) + 4
    places = {273: after, 279: after + 4 * number}
    entries = b"".join(
        struct.pack(
            "<HHII",
            tag,
            4,
            number if tag in places else 1,
            places.get(tag, value),
        )
        for tag, value in tags
    )
    pixel = after + 8 * number
    data = struct.pack(f"<{number}I", *[pixel] * number)
    sizes = struct.pack(f"<{number}I", *[1] * number)
    head = struct.pack("<2sHIH", b"II", 42, 8, len(tags))
    return head + entries + bytes(4) + data + sizes + b"7"


def _many_scans(image: Image.Image, number: int) -> bytes:
    data = _file(image, "JPEG", progressive=True)
    start = data.rindex(b"\xff\xda")
    more = number - data.count(b"\xff\xda")
    return data[:-2] + data[start:-2] * more + data[-2:]


def _png_chunk(name: bytes, content: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(name + content))
    return struct.pack(">I", len(content)) + name + content + checksum


def _attacks(side: int) -> Mapping[str, Callable[[], list[bytes]]]:
    """Images of each attack, by its name."""
    flat = Image.new("RGB", (side, side), (3, 4, 5))
    small = Image.new("RGB", (64, 64))
    grey = Image.fromarray(np.zeros((side, side), np.uint16))
    chunk = _png_chunk(b"abCd", b"")
    text = _png_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(2**20 - 1), 9))
    profile = _png_chunk(b"iCCP", text[8:-4])
    many = side * 125
    return {
        "none": list,
        "two TIFFs of a million strips": lambda: [_strips(many)] * 2,
        "TIFFs of 65,536 strips": lambda: [_strips(1 << 16)] * 8,
        "GIF of a million comments": lambda: [
            _with_parts(_file(small, "GIF"), 781, b"!\xfe\1a\0", many)
        ],
        "PNG of a million chunks": lambda: [
            _with_parts(_file(small, "PNG"), 33, chunk, many)
        ],
        "PNGs of 4000 colour profiles": lambda: (
            [_with_parts(_file(small, "PNG"), 33, profile, side // 2)] * 4
        ),
        "PNGs of 60 texts": lambda: (
            [_with_parts(_file(small, "PNG"), 33, text, 60)] * 16
        ),
        "JPEG of a million segments": lambda: [
            _with_parts(_file(small, "JPEG"), 2, b"\xff\xfe\0\2", many)
        ],
        "32 AVIFs of 1 kB": lambda: [_file(flat, "AVIF", speed=10)] * 32,
        "WebP": lambda: [_file(flat, "WEBP", method=0)] * 8,
        "PNG": lambda: [_file(flat, "PNG")] * 8,
        "PNG of 16 bits": lambda: [_file(grey, "PNG")] * 8,
        "JPEG of 100 scans": lambda: [_many_scans(flat, 100)] * 8,
        "PNGs of 1 x 1000 pixels": lambda: (
            [_file(Image.new("RGB", (1, 1000)), "PNG")] * 64
        ),
    }


def _photographs(number: int) -> list[bytes]:
    random = np.random.default_rng(0)
    noise = random.integers(0, 255, (25, 32, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((500, 375))
    return [_file(image, "JPEG")] * number


def _write_tar(path: Path, images: Sequence[bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for number, data in enumerate(images):
            info = tarfile.TarInfo(f"{number:03d}.jpg")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("attacks", __doc__)
    options = parse(parser, argv)
    return exit_status("attacks", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    side = QUICK_SIDE if options.quick else SIDE
    seconds = QUICK_SECONDS if options.quick else SECONDS
    attacks = list(_attacks(side).items())[: 3 if options.quick else None]
    rows: list[dict[str, Any]] = []
    for name, images in attacks:
        # A worker of its own, whose memory no other attack has used.
        with temporary_folder() as folder:
            measured = _measure(folder, images(), seconds)
        rows.append({"attack": name, **measured})
        print(f"{name}: {rows[-1]}", flush=True)
        write_results(
            options.json,
            "attacks",
            {"quick": options.quick},
            {"attacks": rows},
        )
    print_table(
        "Seconds of the neighbour's requests",
        ("attack", "requests", "median", "99 of 100", "longest"),
        [
            (
                row["attack"],
                str(row["requests"]),
                *(f"{row[key]:.2f}" for key in ("p50", "p99", "longest")),
            )
            for row in rows
        ],
    )
    print_goals({row["attack"]: row["p99"] < GOAL_SECONDS for row in rows})
    return 0


def _measure(
    folder: Path, images: Sequence[bytes], seconds: float
) -> dict[str, Any]:
    package, cut = package_model(folder, "mobilenet_v3_small", "features.4")
    kinds = {"AUTH_attacker": images, "AUTH_neighbour": _photographs(8)}
    with ExitStack() as stack:
        path = stack.enter_context(running_worker(folder, "cpu", ()))
        clients = {}
        for account, files in kinds.items():
            shard = folder / f"{account}.tar"
            _write_tar(shard, files)
            clients[account] = stack.enter_context(stream_client(account))
            clients[account].ask(
                "open",
                seconds=QUESTION_SECONDS,
                path=str(path),
                account=account,
                package=str(package),
                shard=str(shard),
                cut=cut,
                encoding="float32",
                owner="AUTH_owner",
            )
        begin = time.monotonic() + 0.5
        counted = begin + WARM_SECONDS
        pool = stack.enter_context(ThreadPoolExecutor(2))
        attacking = pool.submit(
            clients["AUTH_attacker"].ask,
            "run",
            seconds=QUESTION_SECONDS,
            begin=begin,
            end=counted + seconds,
            streams=STREAMS if images else 0,
            is_lenient=True,
        )
        answer = clients["AUTH_neighbour"].ask(
            "run",
            seconds=QUESTION_SECONDS,
            begin=counted,
            end=counted + seconds,
            streams=1,
        )
        attacking.result()
    times = np.asarray(answer["requests"])
    return {
        "requests": len(times),
        "p50": float(np.quantile(times, 0.5)),
        "p99": float(np.quantile(times, 0.99)),
        "longest": float(times.max()),
    }


if __name__ == "__main__":
    sys.exit(main())
