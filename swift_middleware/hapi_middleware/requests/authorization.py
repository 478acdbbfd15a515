"""Who asks, who pays, and by whose right an object is read.

Four rules, each with a test:

* A sub-request for the *source* goes to the client's own path and inherits
  all that the client's request has been granted.
* One for an object of *many* goes to another path, so that Swift judges it as
  the caller's own GET.  A request that another's grant has let through cannot
  have them.
* One for the *model* likewise goes to another path.  It inherits the
  caller's identity, so that Swift judges it as the caller's own GET; but who
  holds another's grant for one path (a temporary or presigned URL, what
  s3_acl has decided) has no identity.  Then the model is read as an anonymous
  caller would.
* The account that is *charged* is the caller's project, from what the auth
  middleware has found out, never from a header and never the owner's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from swift.common.middleware.acl import parse_acl, referrer_allowed
from swift.common.swob import HTTPForbidden, HTTPUnauthorized, Request
from swift.common.wsgi import make_subrequest

from hapi_middleware.config import FilterConfig
from hapi_protocol.errors import HapiError, make_error
from hapi_protocol.job_messages import UNAUTHENTICATED_ACCOUNT

SWIFT_SOURCE = "HP"
"""``swift.source`` of all sub-requests of this filter."""

_OVERRIDE = "swift.authorize_override"
_S3_DETAILS = "s3api.auth_details"
_PRESIGNED = ("X-Amz-Credential", "AWSAccessKeyId")
"""Parameters of URLs that are signed, version 4 and 2."""
_CARRIED = {
    "HTTP_X_NEWEST": "X-Newest",
    "HTTP_X_OPEN_EXPIRED": "X-Open-Expired",
}


def source_request(
    env: Mapping[str, Any],
    method: str,
    headers: Mapping[str, str] | None = None,
) -> Request:
    """The client's own request again, at exactly its path and query."""
    # Without a path, make_subrequest() keeps the path and the query.
    return make_subrequest(
        env,
        method=method,
        headers={**_carried(env), **(headers or {})},
        swift_source=SWIFT_SOURCE,
    )


def is_delegated(env: Mapping[str, Any]) -> bool:
    """Whether the caller has another's grant for this path, and no name.

    TempURL, formpost and s3_acl override ``swift.authorize``: theirs knows
    one path only, or nods to everything.  Who has a presigned URL of S3 is
    taken for its signer by Swift, but the signer has not signed the
    annotation.
    """
    if env.get(_OVERRIDE):
        return True
    return env.get("swift.source") == "S3" and _is_presigned(env)


def _is_presigned(env: Mapping[str, Any]) -> bool:
    # An Authorization header tells nothing: s3api ignores it beside a
    # signature in the URL.  So we look at the request that s3api has
    # checked; its checker knows it, or is it (Swift before 2.38).
    details = env.get(_S3_DETAILS) or {}
    checker = getattr(details.get("check_signature"), "__self__", None)
    checked = getattr(checker, "req", checker)
    if not isinstance(checked, Request):
        return True
    return any(name in checked.params for name in _PRESIGNED)


def object_request(env: Mapping[str, Any], path: str) -> Request:
    """A GET of another object than the client's own, by the caller's right.

    Args:
        env: of a request that :func:`refuse_overridden` lets through.
        path: ``/v1/account/container/object``, quoted.
    """
    request = make_subrequest(
        env,
        method="GET",
        path=path,
        headers=_carried(env),
        swift_source=SWIFT_SOURCE,
    )
    # make_subrequest() repeats the client's query where there is none.
    request.environ["QUERY_STRING"] = ""
    return request


def refuse_overridden(env: Mapping[str, Any]) -> None:
    """
    Raises:
        RightsError: ``multi_not_allowed``: a ``swift.authorize`` that was
            meant for one path would nod to every other.
    """
    if is_delegated(env):
        raise make_error(
            "multi_not_allowed",
            "a temporary URL, or another grant for one path, allows no "
            "request for many objects; use a token",
        )


def _carried(env: Mapping[str, Any]) -> dict[str, str]:
    return {name: env[key] for key, name in _CARRIED.items() if key in env}


def model_request(env: Mapping[str, Any], method: str, path: str) -> Request:
    """A request for the model at ``path``, by the caller's own right.

    Args:
        path: ``/v1/account/container/object``, quoted.
    """
    request = make_subrequest(
        env, method=method, path=path, swift_source=SWIFT_SOURCE
    )
    # make_subrequest() repeats the client's query where there is none.
    request.environ["QUERY_STRING"] = ""
    if is_delegated(env):
        request.environ.pop(_OVERRIDE, None)
        request.environ.pop("REMOTE_USER", None)
        request.environ["swift.authorize"] = authorize_anonymous
    return request


def authorize_anonymous(request: Request) -> Any:
    """``swift.authorize`` of one without identity: the container's read ACL.

    Returns:
        None where a referrer rule of the ACL (``.r:*``) admits the GET or
        HEAD of an object, else Swift's 401.
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
    """Why the caller does not own the account; None where it does.

    It does where Swift would let it see the account itself as its owner
    (``swift_owner``: admins of the account, operators of the project).  What
    a temporary URL or an ACL of S3 has granted counts for nothing here.

    Returns:
        A WSGI application, which answers as Swift does.
    """
    authorize = env.get("swift.authorize")
    if authorize is None or is_delegated(env):
        return HTTPForbidden()
    request = make_subrequest(
        env,
        method="GET",
        path=f"/v1/{quote(account)}",
        swift_source=SWIFT_SOURCE,
    )
    request.environ["QUERY_STRING"] = ""
    denied = authorize(request)
    if denied is not None:
        return denied
    is_ours = bool(request.environ.get("swift_owner"))
    return None if is_ours else HTTPForbidden(request=request)


def is_owner(env: Mapping[str, Any], account: str) -> bool:
    """Whether the caller owns the account; see :func:`owner_refusal`."""
    return owner_refusal(env, account) is None


def charged_account(
    env: Mapping[str, Any], reseller_prefix: str, allow_unauthenticated: bool
) -> str:
    """The name under which the caller's computing is accounted.

    Raises:
        RightsError: ``compute_not_allowed``, for a caller without project.
    """
    project = _project(env)
    if project:
        return f"{reseller_prefix}{project}"
    if allow_unauthenticated:
        return UNAUTHENTICATED_ACCOUNT
    raise make_error(
        "compute_not_allowed",
        "only callers with a project may compute here; authenticate with a "
        "token (anonymous requests and temporary URLs have none)",
    )


def paying_account(env: Mapping[str, Any], config: FilterConfig) -> str:
    """The charged account, which the operator lets compute.

    ``allowed_accounts`` is about projects: callers without one are admitted
    or not by ``allow_unauthenticated_compute`` alone.

    Raises:
        RightsError: ``compute_not_allowed``.
    """
    account = charged_account(
        env, config.reseller_prefix, config.allow_unauthenticated_compute
    )
    allowed = config.allowed_accounts
    if not allowed or account in allowed or account == UNAUTHENTICATED_ACCOUNT:
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
    # keystoneauth sets this key for confirmed tokens only; the headers of
    # authtoken are as good as the client's word where authtoken is absent.
    project_id, _name = identity["tenant"]
    return project_id or None


def _tempauth_project(groups: str) -> str | None:
    # tempauth: "<account>,<account>:<user>[,group...]"; only a user that is
    # admin of its account has the account's storage name among the groups.
    account, _, rest = groups.partition(",")
    user = rest.partition(",")[0]
    if not account or account.startswith("."):
        return None
    return account if user.startswith(f"{account}:") else None


def refusal(status: int, what: str, name: str) -> HapiError:
    """The error for an object that Swift does not let the caller read.

    Args:
        status: Swift's answer to the caller's own HEAD, 400 or more.
        what: ``model``, for the message.
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
