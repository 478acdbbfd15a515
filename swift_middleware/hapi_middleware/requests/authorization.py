"""Authorization: rights of sub-requests, and the account that is charged.

Four rules, each with a test:

* A sub-request for the *source* goes to the client's own path and inherits
  every right that Swift granted to the client's request.
* A sub-request for one of *many objects*, for a link's target or for a
  segment goes to another path; Swift authorises it as the caller's own GET.
  A request that only holds someone else's grant for one path may not ask for
  them.
* A sub-request for the *model* goes to another path; Swift authorises it as
  the caller's own GET.  A caller that only holds someone else's grant for one
  path (a temporary or presigned URL, a decision of s3_acl) has no identity:
  the model is then read as an anonymous caller would read it.
* The *charged* account is the caller's project as the auth middleware
  established it, never a header's value and never the owner's account.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from swift.common.http import is_success
from swift.common.middleware.acl import parse_acl, referrer_allowed
from swift.common.swob import HTTPForbidden, HTTPUnauthorized, Request
from swift.common.wsgi import make_subrequest
from swift.proxy.controllers.base import get_container_info

from hapi_middleware.config import FilterConfig
from hapi_protocol.errors import HapiError, make_error
from hapi_protocol.job_messages import UNAUTHENTICATED_ACCOUNT

SWIFT_SOURCE = "HP"
"""``swift.source`` of all sub-requests of this filter."""

_OVERRIDE = "swift.authorize_override"
_S3_DETAILS = "s3api.auth_details"
_PRESIGNED = ("X-Amz-Credential", "AWSAccessKeyId")
"""Parameters of presigned URLs of signature versions 4 and 2."""
_FORWARDED_HEADERS = {
    "HTTP_X_NEWEST": "X-Newest",
    "HTTP_X_OPEN_EXPIRED": "X-Open-Expired",
}


def source_request(
    env: Mapping[str, Any],
    method: str,
    headers: Mapping[str, str] | None = None,
) -> Request:
    """A sub-request with the path and query of the client's request."""
    # Without a path, make_subrequest() keeps the path and the query.
    return make_subrequest(
        env,
        method=method,
        headers={**_forwarded_headers(env), **(headers or {})},
        swift_source=SWIFT_SOURCE,
    )


def is_delegated(env: Mapping[str, Any]) -> bool:
    """Returns True if the caller only holds someone else's grant for a path.

    TempURL, formpost and s3_acl override ``swift.authorize`` with a function
    that allows one path only, or everything.  Swift treats the holder of a
    presigned S3 URL as its signer, but the signer has not signed the
    annotation.
    """
    if env.get(_OVERRIDE):
        return True
    return env.get("swift.source") == "S3" and _is_presigned(env)


def _is_presigned(env: Mapping[str, Any]) -> bool:
    # An Authorization header proves nothing: s3api ignores it if the URL is
    # signed.  The request that s3api has verified decides; the verifier has
    # it as an attribute, or is it (Swift before 2.38).
    details = env.get(_S3_DETAILS) or {}
    checker = getattr(details.get("check_signature"), "__self__", None)
    checked = getattr(checker, "req", checker)
    if not isinstance(checked, Request):
        return True
    return any(name in checked.params for name in _PRESIGNED)


def object_request(
    env: Mapping[str, Any], path: str, method: str = "GET"
) -> Request:
    """A request for another object, with the caller's own rights.

    Args:
        env: WSGI environment of a request that :func:`refuse_delegated`
            accepts.
        path: ``/v1/account/container/object``, quoted.
        method: GET or HEAD.
    """
    headers = _forwarded_headers(env)
    return _subrequest_to(env, method, path, headers)


def _subrequest_to(
    env: Mapping[str, Any],
    method: str,
    path: str,
    headers: Mapping[str, str] | None = None,
) -> Request:
    request = make_subrequest(
        env,
        method=method,
        path=path,
        headers=dict(headers or {}),
        swift_source=SWIFT_SOURCE,
    )
    # make_subrequest() repeats the client's query if the path has none.
    request.environ["QUERY_STRING"] = ""
    return request


def refuse_delegated(env: Mapping[str, Any]) -> None:
    """Refuses a request for many objects without an identity of its own.

    Raises:
        RightsError: ``multi_not_allowed``: a ``swift.authorize`` that was
            meant for one path may allow any other.
    """
    if is_delegated(env):
        raise make_error(
            "multi_not_allowed",
            "a temporary URL, or another grant for one path, allows no "
            "request for many objects; use a token",
        )


def _forwarded_headers(env: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: env[key]
        for key, name in _FORWARDED_HEADERS.items()
        if key in env
    }


def model_request(env: Mapping[str, Any], method: str, path: str) -> Request:
    """A request for the model, with the caller's own rights.

    Args:
        env: WSGI environment of the client's request.
        method: GET or HEAD.
        path: ``/v1/account/container/object``, quoted.
    """
    request = _subrequest_to(env, method, path)
    if is_delegated(env):
        request.environ.pop(_OVERRIDE, None)
        request.environ.pop("REMOTE_USER", None)
        request.environ["swift.authorize"] = authorize_anonymous
    return request


def may_read(app: Any, env: Mapping[str, Any], path: str) -> bool:
    """True if Swift would allow the caller's own GET of an object.

    It decides as Swift's proxy does, by the container's read ACL, and asks no
    object server.

    Args:
        app: the rest of the pipeline.
        env: WSGI environment of the client's request.
        path: ``/v1/account/container/object``, quoted.
    """
    request = model_request(env, "HEAD", path)
    info = get_container_info(request.environ, app, SWIFT_SOURCE)
    request.acl = info["read_acl"]
    authorize = request.environ.get("swift.authorize")
    return is_success(info["status"]) and (
        authorize is None or authorize(request) is None
    )


def authorize_anonymous(request: Request) -> Any:
    """A ``swift.authorize`` for anonymous callers: the container's read ACL.

    Returns:
        None if a referrer rule of the ACL (``.r:*``) allows the GET or HEAD
        of an object, else Swift's 401.
    """
    try:
        _version, _account, _container, name = request.split_path(4, 4, True)
    except ValueError:
        name = None
    referrers, _groups = parse_acl(getattr(request, "acl", None))
    is_read = bool(name) and request.method in ("GET", "HEAD")
    if is_read and referrer_allowed(request.referer, referrers):
        return None
    return HTTPUnauthorized(request=request)


def owner_refusal(env: Mapping[str, Any], account: str) -> Any:
    """Swift's refusal to a caller that does not own the account.

    An owner is a caller to whom Swift gives ``swift_owner`` on a GET of the
    account (admins of the account, operators of the project).  Grants of
    temporary URLs and S3 ACLs do not count.

    Returns:
        None for an owner, else a WSGI application that answers as Swift does.
    """
    authorize = env.get("swift.authorize")
    if authorize is None or is_delegated(env):
        return HTTPForbidden()
    request = _subrequest_to(env, "GET", f"/v1/{quote(account)}")
    denied = authorize(request)
    if denied is not None:
        return denied
    is_owner = bool(request.environ.get("swift_owner"))
    return None if is_owner else HTTPForbidden(request=request)


def is_owner(env: Mapping[str, Any], account: str) -> bool:
    """Returns True if the caller owns the account (:func:`owner_refusal`)."""
    return owner_refusal(env, account) is None


def paying_account(env: Mapping[str, Any], config: FilterConfig) -> str:
    """The account that is charged for the caller's computing.

    ``allowed_accounts`` limits projects; callers without a project are
    admitted by ``allow_unauthenticated_compute`` alone.

    Raises:
        RightsError: ``compute_not_allowed``.
    """
    project = _project(env)
    if not project:
        if config.allow_unauthenticated_compute:
            return UNAUTHENTICATED_ACCOUNT
        raise make_error(
            "compute_not_allowed",
            "only callers with a project may compute here; authenticate with "
            "a token (anonymous requests and temporary URLs have none)",
        )
    account = f"{config.reseller_prefix}{project}"
    if not config.allowed_accounts or account in config.allowed_accounts:
        return account
    raise make_error(
        "compute_not_allowed",
        f"the account {account} may not compute here; read the object "
        "without X-Hapi-* headers, or ask the operator to admit it "
        "(allowed_accounts)",
    )


def _project(env: Mapping[str, Any]) -> str | None:
    if is_delegated(env):
        return None
    user = env.get("REMOTE_USER")
    identity = env.get("keystone.identity")
    if identity and user == identity.get("tenant"):
        return _keystone_project(identity)
    if isinstance(user, str):
        return _tempauth_project(user)
    return None


def _keystone_project(identity: Mapping[str, Any]) -> str | None:
    # keystoneauth sets this key for validated tokens only.  The headers of
    # authtoken prove nothing: without authtoken the client can set them.
    project_id, _name = identity["tenant"]
    return project_id or None


def _tempauth_project(groups: str) -> str | None:
    # tempauth: "<account>,<account>:<user>[,group...]"; only an admin of the
    # account has the account's storage name among the groups.
    account, _, rest = groups.partition(",")
    user = rest.partition(",")[0]
    if not account or account.startswith("."):
        return None
    return account if user.startswith(f"{account}:") else None


def refusal(status: int, what: str, name: str) -> HapiError:
    """The error for an object that Swift does not let the caller read.

    Args:
        status: Swift's answer to the caller's own HEAD, 400 or more.
        what: role of the object in the message, for instance ``model``.
        name: ``/account/container/object``.
    """
    facts = {"object_name": name, "details": {"object_role": what}}
    codes = {401: "unauthorized", 403: "forbidden", 404: "not_found"}
    if status in codes:
        return make_error(
            codes[status],
            f"the {what} {name}: Swift answers {status} to your own GET of it",
            **facts,
        )
    if status >= 500 or status in (408, 429, 498):
        return make_error(
            "service_unavailable",
            f"the {what} {name} cannot be read now: Swift answers {status}",
            retry_after=1,
            **facts,
        )
    return make_error(
        "bad_model",
        f"the {what} {name}: Swift answers {status} to your own GET of it",
        **facts,
    )
