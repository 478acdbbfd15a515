"""The model package that a request names, read with the caller's rights."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from swift.common.swob import Request, Response
from swift.common.utils import close_if_possible, drain_and_close

from hapi_middleware.requests.annotation_request import Env
from hapi_middleware.requests.authorization import (
    may_read,
    model_request,
    refusal,
    source_request,
)
from hapi_middleware.requests.subrequests import ObjectBody, ObjectHead
from hapi_protocol.errors import HapiError, PackageError, TooLargeError
from hapi_protocol.headers import ModelPath
from hapi_protocol.job_messages import ModelIdentity

MIN_PACKAGE_BYTES = 64
"""Shortest header of a package."""
KNOWN_SECONDS = 1.0
"""Age at which a package is looked at again.  All requests of a job name one
package: at 1,000 storage nodes its three hosts had 5,200 HEADs a second."""
MAX_KNOWN = 1000
"""Less than a megabyte; a cluster's jobs use a few packages at a time."""


class KnownPackages:
    """Facts about packages that this process has just looked at.

    They say nothing of who may read them.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heads: OrderedDict[str, tuple[float, ObjectHead]] = OrderedDict()

    def find(self, name: str) -> ObjectHead | None:
        """Facts that are new enough, of ``/account/container/object``."""
        looked, head = self._heads.get(name, (float("-inf"), None))
        return head if self._clock() - looked < KNOWN_SECONDS else None

    def add(self, name: str, head: ObjectHead) -> None:
        """Keeps facts, unless the bytes are those of another name."""
        if not head.is_plain:
            return
        self._heads[name] = self._clock(), head
        self._heads.move_to_end(name)
        while len(self._heads) > MAX_KNOWN:
            self._heads.popitem(last=False)


@dataclass(eq=False, repr=False)
class Package:
    """The model package that an annotation names.

    Args:
        app: the rest of the pipeline.
        env: WSGI environment of the client's request.
        path: path of the package.
        max_bytes: the filter's ``max_package_bytes``.
        is_own: the client's own request names the package, which is then
            read with every right that Swift granted to that request.
        known: packages that this process has just looked at.

    Attributes:
        name: ``/account/container/object``.
        head: facts about it, from :meth:`identify`.
    """

    app: Any
    env: Env
    path: ModelPath
    max_bytes: int
    _: KW_ONLY
    is_own: bool = False
    known: KnownPackages | None = None

    def __post_init__(self) -> None:
        self._url = f"/v1{self.path.quoted()}"
        self.name = (
            f"/{self.path.account}/{self.path.container}/{self.path.object}"
        )
        self.head = ObjectHead("", None, is_manifest=False)

    def identify(self) -> ModelIdentity:
        """The model's identity, if the caller may GET the package.

        Raises:
            RightsError: as Swift answers the caller's own GET.
            PackageError: a manifest, or too short to be a package.
            TooLargeError: ``package_too_large``.
        """
        known = self.known and self.known.find(self.name)
        if known and may_read(self.app, self.env, self._url):
            self.head = known
            return self.identity_from_head(known)
        return self.identify_again()

    def identify_again(self) -> ModelIdentity:
        """The model's identity now, as :meth:`identify`."""
        response, request = self._get_response("HEAD")
        drain_and_close(response)
        if not response.is_success:
            raise refusal(response.status_int, "model", self.name)
        self.head = ObjectHead.from_response(response, request)
        identity = self.identity_from_head(self.head)
        if self.known is not None:
            self.known.add(self.name, self.head)
        return identity

    def open(self, identity: ModelIdentity) -> ObjectBody | None:
        """Opens the package's bytes; None if its version has changed.

        Raises:
            RightsError: the caller may no longer read it.
        """
        response, _ = self._get_response("GET")
        if not response.is_success:
            drain_and_close(response)
            raise refusal(response.status_int, "model", self.name)
        head = ObjectHead.from_response(response)
        try:
            now = self.identity_from_head(head)
        except HapiError:
            close_if_possible(response.app_iter)
            raise
        if now != identity:
            close_if_possible(response.app_iter)
            return None
        return ObjectBody(
            response.app_iter, identity.length_bytes, self.name, head.md5
        )

    def _get_response(self, method: str) -> tuple[Response, Request]:
        if self.is_own:
            request = source_request(self.env, method)
        else:
            request = model_request(self.env, method, self._url)
        return request.get_response(self.app), request

    def identity_from_head(self, head: ObjectHead) -> ModelIdentity:
        """The model's identity, by an authorised HEAD of the package.

        Raises:
            PackageError: a manifest, or too short to be a package.
            TooLargeError: ``package_too_large``.
        """
        if head.is_manifest:
            # The HEAD of a manifest authorises none of its segments.
            raise PackageError(
                "package_is_manifest",
                f"the model {self.name} is a large-object manifest; upload "
                "the package as one object",
                object_name=self.name,
            )
        length = head.length_bytes or 0
        if length < MIN_PACKAGE_BYTES or not head.etag:
            raise PackageError(
                "bad_package",
                f"the model {self.name} has {length} bytes and is not a "
                "model package",
                object_name=self.name,
            )
        if length > self.max_bytes:
            raise TooLargeError(
                "package_too_large",
                f"the model {self.name} has {length} bytes; at most "
                f"{self.max_bytes} are allowed here",
                object_name=self.name,
                details={"max_package_bytes": self.max_bytes},
            )
        return ModelIdentity(
            account=self.path.account,
            container=self.path.container,
            object=self.path.object,
            etag=head.etag,
            length_bytes=length,
        )
