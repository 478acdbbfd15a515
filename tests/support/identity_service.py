"""A small Keystone: issues, validates and lists tokens.

It has the Identity API v3 (https://docs.openstack.org/api-ref/identity/v3) as
far as keystonemiddleware and keystoneauth1 use it: version documents,
tokens by password and by application credential, their validation, tokens for
signatures of S3, and a catalogue with an identity and an object-store
service.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import ssl
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

HOUR = 3600.0
DOMAIN: Mapping[str, str] = {"id": "default", "name": "Default"}
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"


class RefusedError(Exception):
    """An answer with an error's status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class User:
    """A user, its password, and its roles by name of the project."""

    name: str
    password: str
    roles: Mapping[str, tuple[str, ...]]

    @property
    def id(self) -> str:
        return id_of(self.name)


@dataclass(frozen=True)
class Secret:
    """A secret of a user for one project."""

    secret: str
    user: str
    project: str


def id_of(name: str) -> str:
    """The id of a user or project: 32 hexadecimal digits, as Keystone's."""
    return uuid.uuid5(uuid.NAMESPACE_DNS, name).hex


@dataclass
class IdentityService:
    """Users, credentials, and their tokens.

    Attributes:
        users: users by name.
        credentials: application credentials by id.
        ec2: S3 secrets by access key.
        object_store_url: URL in the catalogue; ``%s`` is replaced by the
            project's id, ``%i`` by the interface.
        url: URL of version 3, once it runs.
        tokens: facts about each token, by id.
    """

    users: Mapping[str, User]
    credentials: Mapping[str, Secret] = field(default_factory=dict)
    ec2: Mapping[str, Secret] = field(default_factory=dict)
    object_store_url: str = ""
    url: str = ""
    tokens: dict[str, dict[str, Any]] = field(default_factory=dict)

    @contextlib.contextmanager
    def running(
        self, tls: ssl.SSLContext | None = None
    ) -> Iterator[IdentityService]:
        """Serves on a free port of this machine."""
        handler = type("_Bound", (_Handler,), {"service": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        scheme = "http"
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
            scheme = "https"
        self.url = f"{scheme}://127.0.0.1:{server.server_address[1]}/v3"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join(5)

    def token(
        self, name: str, project: str, lifetime_seconds: float = HOUR
    ) -> str:
        """Issues a token; an expired one if its lifetime is below 0."""
        user = self.users[name]
        return self._issue(user, project, ["password"], lifetime_seconds)

    def authenticate(self, body: Mapping[str, Any]) -> str:
        """``POST /v3/auth/tokens``: a new token's id."""
        identity = body["auth"]["identity"]
        [method] = identity["methods"]
        if method == "password":
            user = self._user(identity["password"]["user"])
            project = self._project(body["auth"]["scope"]["project"])
        elif method == "application_credential":
            given = identity["application_credential"]
            known = self.credentials.get(given["id"])
            if known is None or known.secret != given["secret"]:
                raise _unauthorized()
            user, project = self.users[known.user], known.project
        else:
            raise RefusedError(400, f"no method {method} here")
        return self._issue(user, project, [method], HOUR)

    def check_signature(self, body: Mapping[str, Any]) -> str:
        """``POST /v3/s3tokens``: a token for the signer of an S3 request."""
        given = body["credentials"]
        known = self.ec2.get(given["access"])
        signed = base64.urlsafe_b64decode(given["token"])
        if known is None or given["signature"] != _signature(known, signed):
            raise _unauthorized()
        user = self.users[known.user]
        return self._issue(user, known.project, ["ec2credential"], HOUR)

    def validate(self, caller: str, subject: str, allow_expired: bool) -> Any:
        """``GET /v3/auth/tokens``: the facts about a token, for a service."""
        if caller not in self.tokens or _is_expired(self.tokens[caller]):
            raise _unauthorized()
        found = self.tokens.get(subject)
        if found is None or (_is_expired(found) and not allow_expired):
            raise RefusedError(404, "Could not recognize Fernet token")
        return found

    def _user(self, given: Mapping[str, Any]) -> User:
        user = self.users.get(given.get("name", ""))
        in_domain = given.get("domain", {}).get("id") == DOMAIN["id"]
        if user is None or not in_domain:
            raise _unauthorized()
        if user.password != given["password"]:
            raise _unauthorized()
        return user

    def _project(self, given: Mapping[str, Any]) -> str:
        names = {name for user in self.users.values() for name in user.roles}
        known = {id_of(name): name for name in names}
        if "id" in given and given["id"] in known:
            return known[given["id"]]
        in_domain = given.get("domain", {}).get("id") == DOMAIN["id"]
        if given.get("name") not in names or not in_domain:
            raise _unauthorized()
        return str(given["name"])

    def _issue(
        self, user: User, project: str, methods: list[str], seconds: float
    ) -> str:
        if project not in user.roles:
            raise _unauthorized()
        now = datetime.now(timezone.utc)
        expires = now + timedelta(seconds=seconds)
        named = {"id": id_of(project), "name": project, "domain": DOMAIN}
        token = uuid.uuid4().hex
        self.tokens[token] = {
            "methods": methods,
            "user": {"id": user.id, "name": user.name, "domain": DOMAIN},
            "project": named,
            "is_domain": False,
            "roles": [
                {"id": id_of(role), "name": role}
                for role in user.roles[project]
            ],
            "catalog": self._catalog(project),
            "issued_at": now.strftime(TIME_FORMAT),
            "expires_at": expires.strftime(TIME_FORMAT),
            "audit_ids": [uuid.uuid4().hex],
        }
        return token

    def _catalog(self, project: str) -> list[dict[str, Any]]:
        store = self.object_store_url.replace("%s", id_of(project))
        urls = {"identity": self.url, "object-store": store}
        return [
            {
                "id": id_of(kind),
                "type": kind,
                "name": kind,
                "endpoints": [
                    {
                        "id": id_of(f"{kind} {interface}"),
                        "interface": interface,
                        "region": "here",
                        "region_id": "here",
                        "url": url.replace("%i", interface),
                    }
                    for interface in ("public", "internal", "admin")
                ],
            }
            for kind, url in urls.items()
        ]


def _is_expired(token: Mapping[str, Any]) -> bool:
    expires = datetime.strptime(token["expires_at"], TIME_FORMAT)
    now = datetime.now(timezone.utc)
    return expires.replace(tzinfo=timezone.utc) <= now


def _signature(secret: Secret, signed: bytes) -> str:
    """AWS signature, version 4, of the "string to sign"."""
    key = f"AWS4{secret.secret}".encode()
    for part in signed.split(b"\n")[2].split(b"/"):
        key = hmac.digest(key, part, "sha256")
    return hmac.digest(key, signed, "sha256").hex()


def _unauthorized() -> RefusedError:
    return RefusedError(
        401, "The request you have made requires authentication."
    )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: IdentityService

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.rstrip("/")
        if path == "/v3/auth/tokens":
            self._serve(self._validate)
        elif path == "/v3":
            self._reply(200, {"version": self._version()})
        elif not path:
            values = {"values": [self._version()]}
            self._reply(300, {"versions": values})
        else:
            self._refuse(RefusedError(404, f"no {path} here"))

    def do_POST(self) -> None:
        makers = {
            "/v3/auth/tokens": self.service.authenticate,
            "/v3/s3tokens": self.service.check_signature,
        }
        make = makers.get(urlsplit(self.path).path)
        if make is None:
            self._refuse(RefusedError(404, f"no {self.path} here"))
        else:
            self._serve(lambda: self._make_token(make))

    def _serve(self, action: Callable[[], None]) -> None:
        try:
            action()
        except RefusedError as error:
            self._refuse(error)

    def _make_token(self, make: Callable[[Any], str]) -> None:
        length = int(self.headers["Content-Length"])
        token = make(json.loads(self.rfile.read(length)))
        facts = self.service.tokens[token]
        self._reply(201, {"token": facts}, {"X-Subject-Token": token})

    def _validate(self) -> None:
        subject = self.headers["X-Subject-Token"]
        found = self.service.validate(
            self.headers["X-Auth-Token"],
            subject,
            "allow_expired=" in self.path,
        )
        self._reply(200, {"token": found}, {"X-Subject-Token": subject})

    def _version(self) -> dict[str, Any]:
        links = [{"rel": "self", "href": f"{self.service.url}/"}]
        return {
            "id": "v3.14",
            "status": "stable",
            "updated": "2020-04-07T00:00:00Z",
            "links": links,
        }

    def _refuse(self, error: RefusedError) -> None:
        facts = {"code": error.status, "message": str(error)}
        self._reply(error.status, {"error": facts})

    def _reply(
        self, status: int, facts: Any, headers: Mapping[str, str] = {}
    ) -> None:
        body = json.dumps(facts).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
