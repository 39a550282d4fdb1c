"""Let in who has the token, from the server's own pages and hosts.

    GET /?token=T  -> a cookie, and on to / without the token in the address
    everything     Host is the server's, the cookie or `Authorization: Bearer T` is right
    POST           Origin, where there is one, is the server's

Another user of the machine can reach loopback, and a web page can make a browser send requests to
it: its name then resolves to 127.0.0.1, which the Host shows, or it sends an Origin.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cartridge_forge.protocols.spec.services import LOOPBACK

CONTENT_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
NO_TOKEN = "the token is missing or wrong; open the address that forge ui printed, as a whole\n"
NO_HOST = "this server is not known by that Host; open the address that forge ui printed\n"


class PageAccess:
    """Wrap an application, and add HEADERS to every reply. `host` is where it listens."""

    def __init__(self, app: ASGIApp, token: str, host: str, *, secure: bool) -> None:
        self._app, self._token, self._secure = app, token.encode(), secure
        self._hosts = {*LOOPBACK, host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, sending)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the reply to a request that does not reach the application, None for one that
        does."""
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        host = headers.get("host", "").lower()
        if re.sub(r":\d*$", "", host) not in self._hosts:
            return PlainTextResponse(NO_HOST, 421)
        origin = headers.get("origin", "")
        if scope["method"] not in ("GET", "HEAD") and origin:
            scheme = "https" if self._secure else "http"
            if origin.lower() != f"{scheme}://{host}":
                return PlainTextResponse("another site's page may not send this\n", 403)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        token = dict(query).get("token")
        if token is not None and scope["method"] == "GET":
            return self._enter(scope["path"], token, query, host)
        bearer = headers.get("authorization", "").removeprefix("Bearer ").strip()
        if self._is_right(bearer) or self._is_right(_cookie(headers, _name_for(host))):
            return None
        return PlainTextResponse(NO_TOKEN, 401)

    def _enter(self, path: str, token: str, query: list[tuple[str, str]], host: str) -> Response:
        if not self._is_right(token):
            return PlainTextResponse(NO_TOKEN, 401)
        query_text = urlencode([(key, value) for key, value in query if key != "token"])
        # One leading slash: two would name another host.
        reply = RedirectResponse(
            "/" + path.lstrip("/") + (f"?{query_text}" if query_text else ""), 303
        )
        reply.set_cookie(_name_for(host), token, httponly=True, samesite="lax", secure=self._secure)
        return reply

    def _is_right(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("latin-1", "replace"), self._token)


def _name_for(host: str) -> str:
    """Return the cookie's name: browsers share cookies between the ports of a host."""
    return f"forge_ui_{host.rpartition(':')[2]}" if ":" in host else "forge_ui"


def _cookie(headers: Mapping[str, str], name: str) -> str:
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return "" if cookie is None else cookie.value
