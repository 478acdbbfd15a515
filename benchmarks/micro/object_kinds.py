"""Objects of all kinds, and requests for their spans."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import requests
from PIL import Image
from swift.common.ring import Ring
from swift.common.utils import set_swift_dir
from swiftclient.client import get_auth

from hapi_cluster import Cluster
from hapi_middleware.places.places import spread
from hapi_protocol.headers import HEADER_IF_SOURCE_ETAG
from hapi_protocol.shards import iter_samples

SPAN_SAMPLES = 4
TIMEOUT_SECONDS = 120.0
OBJECT_SERVERS = ("object", "object-2", "object-3")
REPLICATED, CODED = "replicated", "ec42"
SEGMENT_SAMPLES, PIECE_BYTES, SMALL_PIXELS = 20, 24_000, 96


@dataclass(frozen=True)
class Ask:
    """A request: ``/container/object``, headers, names of many objects."""

    path: str
    headers: Mapping[str, str]
    body: bytes | None = None


class User:
    """Stores objects and sends requests.

    Args:
        cluster: the cluster.
        etc: configuration with the rings of the proxies.
        store_url: proxy through which objects are stored.
    """

    def __init__(self, cluster: Cluster, etc: Path, store_url: str) -> None:
        login = cluster.environment
        url, token = get_auth(
            login["ST_AUTH"], login["ST_USER"], login["ST_KEY"]
        )
        self.account = url.rpartition("/")[2]
        self._headers = {"X-Auth-Token": token}
        self._store_url = store_url
        set_swift_dir(str(etc))  # for the suffix of hashes
        self._ring = Ring(str(etc), ring_name="object-1")

    def container(self, name: str, **headers: str) -> None:
        headers = {"X-Storage-Policy": REPLICATED, **headers}
        self.put(f"/{name}", headers=headers)

    def first_choice(self, path: str) -> int:
        """Port of the object server that is asked first for a whole object."""
        name = f"/{self.account}{path}"
        _, nodes = self._ring.get_nodes(*name[1:].split("/", 2))
        first = min(nodes, key=lambda node: spread(name, 0, node["id"]))
        return int(first["port"])

    def put(
        self,
        path: str,
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
        url: str = "",
    ) -> str:
        """Stores something; returns its ETag."""
        answer = self._send(
            "PUT", url or self._store_url, Ask(path, headers or {}, data)
        )
        return str(answer.headers.get("ETag", ""))

    def head(self, path: str, url: str) -> Mapping[str, str]:
        return self._send("HEAD", url, Ask(path, {})).headers

    def ask(self, url: str, ask: Ask) -> bytes:
        method = "GET" if ask.body is None else "POST"
        return self._send(method, url, ask).content

    def _send(self, method: str, url: str, ask: Ask) -> requests.Response:
        answer = requests.request(
            method,
            f"{url}/v1/{self.account}{ask.path}",
            data=ask.body,
            headers={**self._headers, **ask.headers},
            timeout=TIMEOUT_SECONDS,
        )
        if not answer.ok:
            raise ValueError(f"{method} {ask.path}: {answer.text[:300]}")
        return answer


class Shard:
    """A shard's bytes and the places of its samples."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        samples = list(iter_samples(io.BytesIO(content), name="shard"))
        self.ends = [
            (sample.offset, sample.offset + sample.length)
            for sample in samples
        ]
        self.photographs = [
            data
            for sample in samples
            for name, data in sample.members.items()
            if name in ("jpg", "jpeg", "png")
        ]

    def spans(
        self,
        path: str,
        etag: str,
        model: Mapping[str, str],
        samples: int = SPAN_SAMPLES,
    ) -> list[Ask]:
        """Requests for all samples, some at a time."""
        spans = []
        for first in range(0, len(self.ends), samples):
            last = min(first + samples, len(self.ends)) - 1
            begin, end = self.ends[first][0], self.ends[last][1]
            headers = {
                "X-Hapi-Samples": f"{first}-{last}",
                "X-Hapi-Range": f"bytes={begin}-{end - 1}",
                HEADER_IF_SOURCE_ETAG: etag.strip('"'),
            }
            spans.append(Ask(path, {**model, **headers}))
        return spans


def store_kinds(
    user: User, shard: Shard, model: Mapping[str, str], encrypting_url: str
) -> dict[str, list[Ask]]:
    """Stores a shard as each kind of object; returns requests for spans.

    Three more kinds are its photographs, the same encrypted, and small ones.
    """
    content, ends = shard.content, [end for _, end in shard.ends]
    borders = {
        "within_segments": ends[SEGMENT_SAMPLES - 1 : -1 : SEGMENT_SAMPLES],
        # In the middle of each span.
        "over_two": ends[SPAN_SAMPLES // 2 - 1 :: SPAN_SAMPLES],
        "small_segments": range(PIECE_BYTES, len(content), PIECE_BYTES),
    }
    user.container("kinds")
    user.container("old", **{"X-Versions-Enabled": "true"})
    user.container("coded", **{"X-Storage-Policy": CODED})
    for path in ("/kinds/plain", "/old/version", "/coded/ec"):
        user.put(path, content)
    user.put("/kinds/encrypted", content, url=encrypting_url)
    user.put("/kinds/link", headers={"X-Symlink-Target": "kinds/plain"})
    version = user.head("/old/version", encrypting_url)["X-Object-Version-Id"]
    user.put("/old/version", b"later")
    for name, places in borders.items():
        parts = zip([0, *places], [*places, len(content)], strict=True)
        manifest = []
        for number, (begin, end) in enumerate(parts):
            manifest.append({"path": f"/kinds/parts/{name}/{number:04}"})
            user.put(manifest[-1]["path"], content[begin:end])
        body = json.dumps(manifest).encode()
        user.put(f"/kinds/slo_{name}?multipart-manifest=put", body)
    dynamic = {"X-Object-Manifest": "kinds/parts/within_segments/"}
    user.put("/kinds/dlo", headers=dynamic)
    paths = {
        **{
            name: f"/kinds/{name}"
            for name in ("plain", "link", *(f"slo_{n}" for n in borders))
        },
        "dlo": "/kinds/dlo",
        "old_version": f"/old/version?version-id={version}",
        "ec": "/coded/ec",
        "encrypted": "/kinds/encrypted",
    }
    etags = {
        path: user.head(path, encrypting_url)["ETag"]
        for path in paths.values()
    }
    first_cut = {**model, "X-Hapi-Cut": "1"}
    spans = {
        name: shard.spans(path, etags[path], model)
        for name, path in paths.items()
    }
    plain = paths["plain"]
    spans["plain_first_cut"] = shard.spans(plain, etags[plain], first_cut)
    spans["plain_index"] = [Ask(plain, {"X-Hapi-Index": "true"})]
    photographs = shard.photographs
    small = [_reduced(photograph) for photograph in photographs]
    for name, images, url in (
        ("many", photographs, ""),
        ("many_encrypted", photographs, encrypting_url),
        ("many_small", small, ""),
    ):
        user.container(name)
        for number, data in enumerate(images):
            user.put(f"/{name}/{number}", data, url=url)
        body = "\n".join(map(str, range(len(images)))).encode()
        spans[name] = [Ask(f"/{name}?hapi", model, body)]
    return spans


def _reduced(photograph: bytes) -> bytes:
    image = Image.open(io.BytesIO(photograph)).convert("RGB")
    sink = io.BytesIO()
    image.resize((SMALL_PIXELS, SMALL_PIXELS)).save(sink, "JPEG")
    return sink.getvalue()
