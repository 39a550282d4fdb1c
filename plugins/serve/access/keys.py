"""Know the caller of a request by its API key, and refuse foreign hosts and origins.

    Host, Origin -> HostMiddleware -> CORS, where origins are named -> ApiKeyMiddleware -> Caller

A web page can make a browser send requests to loopback: its name then resolves to 127.0.0.1, which
the Host shows, or the request carries an Origin.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from cartridge_forge.plugins.chat.wire.errors import ApiError
from cartridge_forge.plugins.serve.access.admission import KeyQuota
from cartridge_forge.plugins.serve.access.audit import NOBODY, AuditLog
from cartridge_forge.plugins.serve.spec import RIGHTS, ApiKeySpec, HttpSpec, Right

OPEN = ("/health", "/ready", "/ping")  # served to all: they reveal the server's health only
CALLER = "forge.caller"  # the key of a scope
ABOUT_CHARACTERS = 200  # of what was refused, in the audit log


@dataclass(frozen=True)
class Caller:
    """Hold what the holder of a key may do; `cartridges` None stands for all of them."""

    name: str
    rights: frozenset[Right]
    cartridges: frozenset[str] | None
    quota: KeyQuota

    def may_use(self, cartridge: str) -> bool:
        return self.cartridges is None or cartridge in self.cartridges

    def check(self, cartridge: str) -> None:
        """Raise ApiError 403 for a cartridge that the key is not for, whether it exists or not."""
        if not self.may_use(cartridge):
            raise ApiError(
                403,
                f"the key {self.name} is not for the cartridge {cartridge}; ask for one of "
                f"{', '.join(sorted(self.cartridges or ()))}",
                param="forge.cartridge",
                code="cartridge_not_permitted",
                about=cartridge,
            )


@dataclass(frozen=True)
class ApiKey:
    """Hold one key's spec and the SHA-256 of its secret; the secret itself is not kept."""

    name: str
    spec: ApiKeySpec
    digest: bytes = field(repr=False)

    @classmethod
    def of(cls, name: str, spec: ApiKeySpec, secret: str) -> ApiKey:
        return cls(name, spec, hashlib.sha256(secret.encode()).digest())

    @property
    def caller(self) -> Caller:
        spec = self.spec
        named = None if spec.cartridges is None else frozenset(spec.cartridges)
        quota = KeyQuota(self.name, spec.in_flight, spec.tokens_per_minute)
        return Caller(self.name, frozenset(spec.rights), named, quota)


def anyone() -> Caller:
    """Return the caller of a server without keys."""
    return Caller(NOBODY, frozenset(RIGHTS), None, KeyQuota(NOBODY, None, None))


class ApiKeyMiddleware:
    """Find the caller by its key, and reject requests without a key or without the right to their
    route. Every key is compared in constant time, and none is ever logged."""

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey], audit: AuditLog) -> None:
        self._app, self._audit, self._anyone = app, audit, anyone()
        self._callers = [(key.digest, key.caller) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        caller = self._caller(scope)
        scope[CALLER] = caller or self._anyone
        if path in OPEN:
            return await self._app(scope, receive, send)
        if caller is None:
            why = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
            refusal = ApiError(401, why, code="invalid_api_key")
        elif (right := right_to(path)) not in caller.rights:
            refusal = ApiError(
                403,
                f"the key {caller.name} has no right to {right}; send a key that has it",
                code="not_permitted",
            )
        else:
            return await self._app(scope, receive, send)
        await refuse(refusal, self._audit, scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        if not self._callers:
            return self._anyone
        headers = dict(scope["headers"])
        # Anthropic's clients send the key in a header of its own.
        credential = headers.get(b"authorization") or b"bearer " + headers.get(b"x-api-key", b"")
        scheme, _, key = credential.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        right = [
            caller
            for key_digest, caller in self._callers
            if hmac.compare_digest(digest, key_digest)
        ]
        return right[0] if right and scheme.lower() == b"bearer" else None


def right_to(path: str) -> Right:
    """Return the right that a route needs."""
    if path.startswith("/admin"):
        return "admin"
    return "metrics" if path == "/metrics" else "inference"


class HostMiddleware:
    """Reject requests for another host, as those by a name that was made to point here, and those
    of web pages. An address is no name: no other machine can serve a page from it."""

    def __init__(self, app: ASGIApp, http: HttpSpec, audit: AuditLog) -> None:
        self._app, self._audit = app, audit
        host = http.listen.rpartition(":")[0]
        self._hosts = {"localhost", host.lower(), *(host.lower() for host in http.hosts)}
        self._origins = frozenset(http.origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        host = re.sub(r":\d*$", "", headers.get(b"host", b"").decode("latin-1").lower())
        origin = headers.get(b"origin", b"").decode("latin-1")
        if scope["path"] not in OPEN and not self._known(host):
            refusal = ApiError(
                421,
                "this server is not known by that Host; add the name to http.hosts where the "
                "server is configured",
                code="unknown_host",
            )
        elif origin and origin not in self._origins:
            refusal = ApiError(
                403,
                "no web page is answered; add its origin to http.origins where the server is "
                "configured",
                code="unknown_origin",
            )
        else:
            return await self._app(scope, receive, send)
        await refuse(refusal, self._audit, scope, receive, send)

    def _known(self, host: str) -> bool:
        if host in self._hosts or "*" in self._hosts:
            return True
        try:
            ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


async def refuse(
    refusal: ApiError, audit: AuditLog, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer with the refusal, once it is in the audit log."""
    await written_down(refusal, audit, scope).response(scope["path"])(scope, receive, send)


def written_down(refusal: ApiError, audit: AuditLog, scope: Scope) -> ApiError:
    """Write a refusal to the audit log and return it, or the error of a log without room."""
    caller = scope.get(CALLER)
    about = {} if refusal.about is None else {"cartridges": [refusal.about[:ABOUT_CHARACTERS]]}
    try:
        audit.refused(
            caller.name if caller else NOBODY, peer_of(scope),
            path=scope["path"][:200], code=refusal.code, **about,
        )  # fmt: skip
    except ApiError as error:
        return error
    return refusal


def peer_of(scope: Scope) -> str | None:
    """Return the address of the client, None for one without."""
    client = scope.get("client")
    return client[0] if client else None
