"""An account whose proxies have the hapi filter: feature streams."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from hapi_client.swift.account import SwiftAccount
from hapi_client.swift.http_client import RequestBody
from hapi_client.swift.response_body import ResponseBody
from hapi_protocol.errors import ClientError
from hapi_protocol.headers import (
    CONTENT_TYPE_STREAM,
    HEADER_PROFILE,
    Annotation,
)
from hapi_protocol.profiles import MAX_PROFILE_BYTES, ModelProfile
from hapi_protocol.versions import common_version

if TYPE_CHECKING:
    from hapi_client.swift.multi_object import ObjectFeatures


class Connection(SwiftAccount):
    """One user's access to one account, and to what computes beside it.

    Args, attributes and errors: as of
    :class:`hapi_client.swift.account.SwiftAccount`.
    """

    def require_hapi(self, *, any_version: bool = False) -> dict[str, Any]:
        """The ``hapi`` section of ``/info``, of a filter that we can ask.

        Args:
            of_any_version: also of one that we can only look at.

        Raises:
            ClientError: ``no_hapi`` when the proxy has no such filter,
                ``unsupported_version`` when it speaks other versions of the
                protocol than we do.
        """
        with self._open_info() as body:
            section = body.read_json(dict).get("hapi")
            proxy = f"the proxy at {urlsplit(self.storage_url).netloc}"
            if not isinstance(section, dict):
                raise ClientError(
                    "no_hapi",
                    f"{proxy} has no hapi filter in its pipeline (no 'hapi' "
                    "section in /info); use cut 0 (streaming), or ask the "
                    "operator to add it",
                )
            if not any_version:
                common_version(section, proxy, version("swift-hapi"))
            return section

    def get_features(
        self,
        container: str,
        name: str,
        annotation: Annotation,
        *,
        retry: bool = True,
        seconds: float | None = None,
    ) -> ResponseBody:
        """An annotated GET: the feature or index stream of an object.

        Args:
            annotation: what to compute.
            patient: repeat on 429 and 5xx before the answer begins.
            seconds: for the whole answer.

        Raises:
            ClientError: ``no_hapi`` when plain bytes come back.
        """
        body = self._open(
            "GET",
            self._url(container, name),
            annotation.to_headers(),
            object_name=f"{container}/{name}",
            seconds=seconds,
            retry=retry,
        )
        _require_stream(body, f"{container}/{name}")
        return body

    def get_many(
        self,
        container: str,
        names: Sequence[str],
        annotation: Annotation,
        *,
        seconds: float | None = None,
    ) -> Iterator[ObjectFeatures]:
        """Features of many objects of one container, in their order.

        An object that fails is a row with an error among the others; a
        request of which no object can be read fails as its first one.  It is
        not repeated by itself.

        Args:
            names: of images or arrays, at most as many as the section
                ``hapi`` of :meth:`info` says in ``multi``; any may stand
                there twice.
            annotation: what to compute.
            seconds: for the whole answer.

        Raises:
            ClientError: ``no_hapi`` when no features come back.
        """
        from hapi_client.swift.multi_object import read_objects

        text = "\n".join(map(quote, names)).encode()
        body = self._open(
            "POST",
            f"{self._url(container)}?hapi",
            annotation.to_headers(),
            source=RequestBody(io.BytesIO(text), len(text), self.traffic),
            object_name=container,
            seconds=seconds,
        )
        _require_stream(body, container)
        return read_objects(body, names, annotation.encoding)

    def get_profile(
        self, container: str, name: str, *, seconds: float
    ) -> ModelProfile:
        """What a package's frozen layers cost next to the data.

        The storage host measures them on its first request, which may take
        a minute; repeated on 429 and 5xx, as when jobs run there.

        Args:
            container: of the package.
            name: of the package.
            seconds: for the answer to one try.

        Raises:
            ClientError: ``no_hapi`` when anything but a profile comes back.
        """
        where = f"{container}/{name}"
        with self._open(
            "GET",
            self._url(container, name),
            {HEADER_PROFILE: "true"},
            object_name=where,
            seconds=seconds,
            # It comes as a whole, after all that was measured.
            read_seconds=seconds,
        ) as body:
            content_type = body.headers.get("Content-Type", "")
            if content_type.partition(";")[0].strip() != "application/json":
                raise ClientError(
                    "no_hapi",
                    f"{where}: the proxy answered with "
                    f"{content_type or 'no content type'} in the place of a "
                    "profile; it has no hapi filter",
                    object_name=where,
                    trans_id=body.trans_id,
                )
            return ModelProfile.from_body(body.read(MAX_PROFILE_BYTES))

    def ask_worker(self, container: str, name: str) -> None:
        """Asks the worker whether it knows an object as a package.

        No matter what the answer is: the filter can give none without its
        worker.

        Args:
            container: of any object that may be read.
            name: of the object.
        """
        self._done(
            "HEAD",
            self._url(container, name),
            {HEADER_PROFILE: "true"},
            object_name=f"{container}/{name}",
        )


def _require_stream(body: ResponseBody, where: str) -> None:
    content_type = body.headers.get("Content-Type", "")
    if content_type.partition(";")[0].strip() == CONTENT_TYPE_STREAM:
        return
    body.close()
    raise ClientError(
        "no_hapi",
        f"{where}: the proxy answered with "
        f"{content_type or 'no content type'} in the place of a feature "
        "stream; it has no hapi filter",
        object_name=where,
        trans_id=body.trans_id,
    )
