"""All methods by which a client may GET an object of a real Swift."""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

import requests

from caller import SECONDS, USERS, Caller
from hapi_cluster import Cluster

TEMPURL_KEY = "secret"
UNIQUE_HEADERS = ("date", "x-trans-id", "x-openstack-request-id")
"""Headers that differ in any two answers."""


@dataclass(frozen=True)
class Target:
    """An object, or one version of it."""

    account: str
    container: str
    name: str
    version: str | None = None

    @property
    def path(self) -> str:
        """``/account/container/object``, quoted."""
        return quote(f"/{self.account}/{self.container}/{self.name}")


@dataclass(frozen=True)
class Answer:
    """The answer to a GET.

    Answers of S3 have no headers here; an S3 error has its code as body.
    """

    status: int
    body: bytes
    headers: Mapping[str, str]

    @classmethod
    def of(cls, response: requests.Response) -> Answer:
        headers = {
            name.lower(): value
            for name, value in response.headers.items()
            if name.lower() not in UNIQUE_HEADERS
        }
        return cls(response.status_code, response.content, headers)


class AccessMethod(Protocol):
    """GETs a target with additional headers."""

    def __call__(
        self, target: Target, headers: Mapping[str, str], /
    ) -> Answer: ...


def by_token(caller: Caller) -> AccessMethod:
    """GET with the caller's token; anonymous if it has none."""

    def get(target: Target, headers: Mapping[str, str]) -> Answer:
        query = f"?version-id={target.version}" if target.version else ""
        return Answer.of(caller.get(target.path + query, headers))

    return get


def by_temporary_url(cluster: Cluster) -> AccessMethod:
    """GET with a signature of the account's owner, who set TEMPURL_KEY."""
    anonymous = Caller(cluster, None)

    def get(target: Target, headers: Mapping[str, str]) -> Answer:
        query = signature(target.path)
        if target.version:
            query += f"&version-id={target.version}"
        return Answer.of(anonymous.get(f"{target.path}?{query}", headers))

    return get


def signature(path: str, method: str = "GET") -> str:
    """The query of a temporary URL for a quoted path."""
    expires = int(time.time()) + 600
    text = f"{method}\n{expires}\n/v1{path}".encode()
    digest = hmac.new(TEMPURL_KEY.encode(), text, "sha256").hexdigest()
    return f"temp_url_sig={digest}&temp_url_expires={expires}"


def s3_client(
    cluster: Cluster,
    user: str,
    secret: str | None = None,
    *,
    signature_version: str = "s3v4",
) -> Any:
    """A boto3 client with a user of :data:`USERS`, or with other keys."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=cluster.proxy_url,
        aws_access_key_id=user,
        aws_secret_access_key=secret or USERS[user],
        region_name="us-east-1",
        config=Config(
            s3={"addressing_style": "path"},
            retries={"max_attempts": 0},
            signature_version=signature_version,
        ),
    )


def with_headers(
    client: Any, headers: Mapping[str, str], call: Callable[[], Any]
) -> Any:
    """Runs ``call()`` with additional headers in the client's requests."""

    def add(request: Any, **_: Any) -> None:
        for name, value in headers.items():
            request.headers[name] = value

    client.meta.events.register("before-sign.s3", add)
    try:
        return call()
    finally:
        client.meta.events.unregister("before-sign.s3", add)


def by_s3(client: Any) -> AccessMethod:
    """GetObject of boto3, signed in headers."""
    from botocore.exceptions import ClientError

    def get(target: Target, headers: Mapping[str, str]) -> Answer:
        try:
            answer = with_headers(
                client, headers, lambda: client.get_object(**_s3(target))
            )
        except ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            return Answer(status, error.response["Error"]["Code"].encode(), {})
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        return Answer(status, answer["Body"].read(), {})

    return get


def by_presigned_url(client: Any) -> AccessMethod:
    """GET of a URL signed by boto3, which does not sign the annotation."""

    def get(target: Target, headers: Mapping[str, str]) -> Answer:
        url = client.generate_presigned_url("get_object", Params=_s3(target))
        sent = {"Accept-Encoding": "identity", **headers}
        answer = requests.get(url, headers=sent, timeout=SECONDS)
        code = re.search(rb"<Error>.*<Code>(\w+)</Code>", answer.content)
        body = code[1] if code else answer.content
        return Answer(answer.status_code, body, {})

    return get


def _s3(target: Target) -> dict[str, str]:
    version = {"VersionId": target.version} if target.version else {}
    return {"Bucket": target.container, "Key": target.name, **version}
