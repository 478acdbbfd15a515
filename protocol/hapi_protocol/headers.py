"""The ``X-Hapi-*`` headers: parsing and writing.

An *annotation* is the set of ``X-Hapi-*`` headers on a GET or HEAD of a data
object.  Parsing is strict: an unknown header or value is refused with the
value and what is allowed, because a misspelt annotation that is ignored would
be answered with raw bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote

from hapi_protocol.encodings import Encoding
from hapi_protocol.errors import AnnotationError
from hapi_protocol.transforms import EVAL, parse_transform

HEADER_MODEL = "X-Hapi-Model"
HEADER_CUT = "X-Hapi-Cut"
HEADER_ENCODING = "X-Hapi-Encoding"
HEADER_TRANSFORM = "X-Hapi-Transform"
HEADER_NUMERICS = "X-Hapi-Numerics"
HEADER_SAMPLES = "X-Hapi-Samples"
HEADER_SPAN_SAMPLES = "X-Hapi-Span-Samples"
HEADER_RANGE = "X-Hapi-Range"
HEADER_CRC32 = "X-Hapi-Crc32"
HEADER_IF_SOURCE_ETAG = "X-Hapi-If-Source-Etag"
HEADER_CACHE = "X-Hapi-Cache"
HEADER_INDEX = "X-Hapi-Index"
HEADER_PROFILE = "X-Hapi-Profile"
REQUEST_HEADERS = (
    HEADER_MODEL,
    HEADER_CUT,
    HEADER_ENCODING,
    HEADER_TRANSFORM,
    HEADER_NUMERICS,
    HEADER_SAMPLES,
    HEADER_SPAN_SAMPLES,
    HEADER_RANGE,
    HEADER_CRC32,
    HEADER_IF_SOURCE_ETAG,
    HEADER_CACHE,
    HEADER_INDEX,
    HEADER_PROFILE,
)

HEADER_SOURCE_ETAG = "X-Hapi-Source-Etag"
HEADER_WORKER = "X-Hapi-Worker"
RESPONSE_HEADERS = (HEADER_SOURCE_ETAG, HEADER_CACHE, HEADER_WORKER)

CONTENT_TYPE_STREAM = "application/vnd.apache.arrow.stream"
"""IANA media type of an Arrow IPC stream."""

NUMERICS = ("exact",)
RESERVED_NUMERICS = ("fast",)
CACHE_OFF = "off"
CACHE_READ = "read"
CACHE_READWRITE = "readwrite"
CACHE_MODES = (CACHE_OFF, CACHE_READ, CACHE_READWRITE)
"""Values of ``X-Hapi-Cache`` in a request."""
CACHE_HIT = "hit"
CACHE_MISS = "miss"
CACHE_STORE = "store"
CACHE_STATES = (CACHE_OFF, CACHE_HIT, CACHE_MISS, CACHE_STORE)
"""Values of ``X-Hapi-Cache`` in an answer; ``store``: a miss that will be
cached."""

MAX_CUT = 1_000_000
"""Only a bound of the parser: packages have at most 20,000 calls, and a cut
beyond those of its model is refused later."""
MAX_INDEX = 2**31 - 1
"""Sample indices travel as int32."""

_DIGITS = re.compile(r"[0-9]{1,18}")
_SAMPLES = re.compile(r"([0-9]{1,18})-([0-9]{1,18})?")
_RANGE = re.compile(
    r"\s*bytes\s*=([0-9]{1,18})-([0-9]{1,18})", re.ASCII | re.IGNORECASE
)
_CRC32S = re.compile(r"[0-9a-f]{8}(,[0-9a-f]{8})*")


@dataclass(frozen=True)
class ModelPath:
    """Decoded account, container and object of a model package."""

    account: str
    container: str
    object: str

    @property
    def path(self) -> str:
        """``/v1/account/container/object``, not quoted (a WSGI path)."""
        return f"/v1/{self.account}/{self.container}/{self.object}"

    def quoted(self) -> str:
        """The header's value, URL-encoded UTF-8."""
        container = f"{quote(self.account, safe='')}/{quote(self.container)}"
        return f"/{container}/{quote(self.object)}"


@dataclass(frozen=True)
class SampleRange:
    """Samples ``first`` to ``last``, zero-based, inclusive.

    ``last`` is None for all samples from ``first`` on.
    """

    first: int
    last: int | None = None

    @property
    def json_form(self) -> list[int | None]:
        """Form in the messages between filter and worker."""
        return [self.first, self.last]

    def __contains__(self, index: object) -> bool:
        return (
            isinstance(index, int)
            and index >= self.first
            and (self.last is None or index <= self.last)
        )

    def __str__(self) -> str:
        return f"{self.first}-{'' if self.last is None else self.last}"


@dataclass(frozen=True)
class ByteRange:
    """Bytes ``first`` to ``last`` of an object, inclusive (RFC 9110)."""

    first: int
    last: int

    @property
    def length_bytes(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"bytes={self.first}-{self.last}"


@dataclass(frozen=True)
class Annotation:
    """A request for features, an index or a profile, as headers state it.

    Attributes:
        model: package of the model; None exactly for an index or a profile.
        cut: cut index, 1..n; 0 exactly if ``model`` is None.
        encoding: a canonical text of :mod:`hapi_protocol.encodings`.
        transform: a text of :mod:`hapi_protocol.transforms`.
        numerics: one of ``NUMERICS`` or ``RESERVED_NUMERICS``.
        samples: requested samples; None for all.
        byte_range: bytes of the object that hold exactly these samples.
        crc32s: CRC-32 of each of these samples by the index; empty if the
            index has none.
        if_source_etag: ETag that the object must have.
        cache: one of ``CACHE_MODES``.
        index: request the object's index rows, without features.
        profile: request the profile of the object, which is a package.
        span_samples: samples of the span that the request has a part of:
            batches are sized by them, so that a sample has the same bits in
            each part; 0 for those of the request.
    """

    model: ModelPath | None
    cut: int
    encoding: str = "float32"
    transform: str = EVAL
    numerics: str = "exact"
    samples: SampleRange | None = None
    byte_range: ByteRange | None = None
    crc32s: tuple[int, ...] = ()
    if_source_etag: str | None = None
    cache: str = "off"
    index: bool = False
    profile: bool = False
    span_samples: int = 0

    def to_headers(self) -> dict[str, str]:
        """The request headers, without those that have default values."""
        values = {
            HEADER_MODEL: self.model.quoted() if self.model else None,
            HEADER_CUT: str(self.cut) if self.model else None,
            HEADER_ENCODING: _unless_default(self.encoding, "float32"),
            HEADER_TRANSFORM: _unless_default(self.transform, EVAL),
            HEADER_NUMERICS: _unless_default(self.numerics, "exact"),
            HEADER_SAMPLES: str(self.samples) if self.samples else None,
            HEADER_SPAN_SAMPLES: _unless_default(str(self.span_samples), "0"),
            HEADER_RANGE: str(self.byte_range) if self.byte_range else None,
            HEADER_CRC32: format_crc32s(self.crc32s) or None,
            HEADER_IF_SOURCE_ETAG: self.if_source_etag,
            HEADER_CACHE: _unless_default(self.cache, "off"),
            HEADER_INDEX: "true" if self.index else None,
            HEADER_PROFILE: "true" if self.profile else None,
        }
        return {name: v for name, v in values.items() if v is not None}


def format_crc32s(crc32s: Sequence[int]) -> str:
    """The value of ``X-Hapi-Crc32``; empty for none."""
    return ",".join(f"{crc32:08x}" for crc32 in crc32s)


def _unless_default(value: str, default: str) -> str | None:
    return None if value == default else value


def is_annotated(names: Iterable[str]) -> bool:
    """Returns True if any header name begins with ``X-Hapi-``."""
    return any(name.lower().startswith("x-hapi-") for name in names)


def parse_annotation(headers: Mapping[str, str], account: str) -> Annotation:
    """Parses the annotation of a request.

    Args:
        headers: all headers of the request; names in any case.
        account: account of the request's path, for a model given as
            ``<container>/<object>``.

    Raises:
        AnnotationError: names the header, its value and what is allowed.
    """
    given = _own_headers(headers)
    if _parse_flag(given, HEADER_PROFILE):
        return _parse_profile_request(given)
    if _parse_flag(given, HEADER_INDEX):
        return _parse_index_request(given)
    model = _parse_model(given, account)
    byte_range = _parse_range(given)
    if_source_etag = _parse_etag(given)
    if byte_range and if_source_etag is None:
        raise AnnotationError(
            "bad_range",
            f"{HEADER_RANGE} needs {HEADER_IF_SOURCE_ETAG}: byte offsets "
            "are those of one version of the object",
        )
    samples = _parse_samples(given, needed=byte_range is not None)
    return Annotation(
        model=model,
        cut=_parse_cut(given),
        encoding=_parse_encoding(given),
        transform=_parse_transform(given),
        numerics=_choice(
            given,
            HEADER_NUMERICS,
            NUMERICS + RESERVED_NUMERICS,
            "unknown_numerics",
        ),
        samples=samples,
        byte_range=byte_range,
        crc32s=_parse_crc32s(given, samples),
        if_source_etag=if_source_etag,
        cache=_choice(given, HEADER_CACHE, CACHE_MODES, "bad_cache"),
        span_samples=_parse_span_samples(given),
    )


def _own_headers(headers: Mapping[str, str]) -> dict[str, str]:
    canonical = {name.lower(): name for name in REQUEST_HEADERS}
    given = {}
    for name, value in headers.items():
        if not name.lower().startswith("x-hapi-"):
            continue
        if name.lower() not in canonical:
            raise AnnotationError(
                "bad_annotation",
                f"unknown header {name!r}; allowed are "
                f"{', '.join(REQUEST_HEADERS)}",
                details={"allowed": list(REQUEST_HEADERS)},
            )
        given[canonical[name.lower()]] = value.strip()
    return given


def _parse_flag(given: Mapping[str, str], header: str) -> bool:
    value = given.get(header, "false").lower()
    if value not in ("true", "false"):
        raise _bad("bad_annotation", header, value, ("true", "false"))
    return value == "true"


def _parse_profile_request(given: Mapping[str, str]) -> Annotation:
    others = sorted(given.keys() - {HEADER_PROFILE})
    if others:
        raise AnnotationError(
            "bad_annotation",
            f"{', '.join(others)}: not allowed with {HEADER_PROFILE}: true; "
            "omit all other X-Hapi headers",
            details={"headers": others},
        )
    return Annotation(model=None, cut=0, profile=True)


def _parse_index_request(given: Mapping[str, str]) -> Annotation:
    allowed = {HEADER_INDEX, HEADER_IF_SOURCE_ETAG}
    for header in given:
        if header not in allowed:
            raise AnnotationError(
                "bad_annotation",
                f"{header} is not allowed with {HEADER_INDEX}: true; omit it",
            )
    return Annotation(
        model=None, cut=0, if_source_etag=_parse_etag(given), index=True
    )


def _parse_model(given: Mapping[str, str], account: str) -> ModelPath:
    value = given.get(HEADER_MODEL, "")
    form = "'/<account>/<container>/<object>' or '<container>/<object>'"
    if not value:
        raise AnnotationError(
            "bad_model", f"{HEADER_MODEL} is missing; give {form}"
        )
    try:
        decoded = unquote(value, errors="strict")
    except UnicodeDecodeError:
        decoded = ""
    if decoded.startswith("/"):
        parts = decoded[1:].split("/", 2)
    else:
        parts = [account, *decoded.split("/", 1)]
    if (
        len(parts) != 3
        or not all(parts)
        or "\x00" in decoded
        or any(part in (".", "..") for part in parts[:2])
    ):
        raise AnnotationError(
            "bad_model",
            f"{HEADER_MODEL} is {value!r}; it must be {form}, URL-encoded "
            "UTF-8",
        )
    return ModelPath(*parts)


def _parse_cut(given: Mapping[str, str]) -> int:
    value = given.get(HEADER_CUT)
    if value is None:
        raise AnnotationError(
            "bad_cut", f"{HEADER_CUT} is missing; give a number from 1"
        )
    cut = int(value) if _DIGITS.fullmatch(value) else 0
    if not 1 <= cut <= MAX_CUT:
        raise AnnotationError(
            "bad_cut",
            f"{HEADER_CUT} is {value!r}; give a number from 1 (cut 0 is a "
            "plain GET)",
        )
    return cut


def _parse_encoding(given: Mapping[str, str]) -> str:
    value = given.get(HEADER_ENCODING, "float32")
    return str(Encoding.parse(value, what=HEADER_ENCODING))


def _parse_transform(given: Mapping[str, str]) -> str:
    value = given.get(HEADER_TRANSFORM, EVAL)
    parse_transform(value, HEADER_TRANSFORM)  # Each has one text form only.
    return value


def _parse_samples(
    given: Mapping[str, str], *, needed: bool
) -> SampleRange | None:
    value = given.get(HEADER_SAMPLES)
    if value is None:
        if needed:
            raise AnnotationError(
                "bad_samples",
                f"{HEADER_RANGE} needs {HEADER_SAMPLES}: the samples whose "
                "members are in that range",
            )
        return None
    match = _SAMPLES.fullmatch(value)
    if match:
        first = int(match[1])
        last = int(match[2]) if match[2] else None
        if first <= (first if last is None else last) <= MAX_INDEX:
            return SampleRange(first, last)
    raise AnnotationError(
        "bad_samples",
        f"{HEADER_SAMPLES} is {value!r}; it must be 'a-b' or 'a-', "
        f"zero-based, inclusive, a <= b <= {MAX_INDEX}",
    )


def _parse_span_samples(given: Mapping[str, str]) -> int:
    value = given.get(HEADER_SPAN_SAMPLES)
    if value is None:
        return 0
    if not _DIGITS.fullmatch(value) or not 1 <= int(value) <= MAX_INDEX:
        raise AnnotationError(
            "bad_samples",
            f"{HEADER_SPAN_SAMPLES} is {value!r}; give a number from 1 to "
            f"{MAX_INDEX}",
        )
    return int(value)


def _parse_range(given: Mapping[str, str]) -> ByteRange | None:
    value = given.get(HEADER_RANGE)
    if value is None:
        return None
    match = _RANGE.fullmatch(value)
    if match and int(match[1]) <= int(match[2]):
        return ByteRange(int(match[1]), int(match[2]))
    raise AnnotationError(
        "bad_range",
        f"{HEADER_RANGE} is {value!r}; it must be 'bytes=s-e' with s <= e",
    )


def _parse_crc32s(
    given: Mapping[str, str], samples: SampleRange | None
) -> tuple[int, ...]:
    value = given.get(HEADER_CRC32)
    if value is None:
        return ()
    if HEADER_RANGE in given and samples and _CRC32S.fullmatch(value):
        crc32s = tuple(int(text, 16) for text in value.split(","))
        if samples.last == samples.first + len(crc32s) - 1:
            return crc32s
    raise AnnotationError(
        "bad_range",
        f"{HEADER_CRC32} is {value!r:.80}; it must have the CRC-32 of each "
        f"of the samples {samples} in {HEADER_RANGE}: 8 lower-case "
        "hexadecimal digits, separated by commas",
    )


def _parse_etag(given: Mapping[str, str]) -> str | None:
    value = given.get(HEADER_IF_SOURCE_ETAG)
    if value is None:
        return None
    etag = value.strip('"')
    if not etag or len(etag) > 256 or '"' in etag:
        raise AnnotationError(
            "bad_annotation",
            f"{HEADER_IF_SOURCE_ETAG} is {value!r}; it must be one ETag",
        )
    return etag


def _choice(
    given: Mapping[str, str], header: str, allowed: tuple[str, ...], code: str
) -> str:
    value = given.get(header, allowed[0])
    if value not in allowed:
        raise _bad(code, header, value, allowed)
    return value


def _bad(
    code: str, header: str, value: str, allowed: tuple[str, ...]
) -> AnnotationError:
    return AnnotationError(
        code,
        f"{header} is {value!r}; allowed: {', '.join(allowed)}",
        details={"value": value, "allowed": list(allowed)},
    )
