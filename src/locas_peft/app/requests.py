"""Which requests the page answers: its own, and none that a foreign page lets a browser send."""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["OwnPageAlone"]

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class OwnPageAlone:
    """Refuses requests that a page of another address lets a browser send.

    A page that listens to this machine alone is addressed by this machine's own names. A foreign
    page whose name leads to this machine (DNS rebinding) has another name.

    Args:
        app: answers the other requests.
        host: the address that is listened on.
    """

    def __init__(self, app: ASGIApp, host: str):
        self._app = app
        self._is_local = host in LOOPBACK

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_foreign(Headers(scope=scope)):
            response = PlainTextResponse("This page answers its own address alone.", 403)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_foreign(self, headers: Headers) -> bool:
        address = headers.get("host", "")
        if self._is_local and _parse(f"//{address}") not in LOOPBACK:
            return True
        origin = headers.get("origin")
        if origin is None:
            return False
        # A proxy before the page may ask for it by another name.
        addresses = {address, headers.get("x-forwarded-host", address)}
        return origin.partition("://")[2] not in addresses


def _parse(address: str) -> str | None:
    """Return the name in an address; None where there is none."""
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None
