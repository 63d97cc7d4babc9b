"""Which requests the page answers: its own, and none that a foreign page lets a browser send."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

__all__ = ["OwnPageAlone"]

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
REFUSAL = b"This page answers its own address alone."


class OwnPageAlone:
    """Refuses requests that a page of another address lets a browser send.

    A page that listens to this machine alone is addressed by this machine's own names. A foreign
    page whose name leads to this machine (DNS rebinding) has another name.

    Args:
        app: an ASGI application, which answers the other requests.
        host: the address that is listened on.
    """

    def __init__(self, app: Any, host: str):
        self._app = app
        self._is_local = host in LOOPBACK

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = {}
            # ASGI's names of headers are lower case.
            for name, value in scope["headers"]:
                headers[name.decode("latin-1")] = value.decode("latin-1")
            if self._is_foreign(headers):
                await send({"type": "http.response.start", "status": 403, "headers": []})
                await send({"type": "http.response.body", "body": REFUSAL})
                return
        await self._app(scope, receive, send)

    def _is_foreign(self, headers: Mapping[str, str]) -> bool:
        address = headers.get("host", "")
        if self._is_local and _find_name(address) not in LOOPBACK:
            return True
        origin = headers.get("origin")
        if origin is None:
            return False
        # A proxy before the page may ask for it by another name.
        addresses = {address, headers.get("x-forwarded-host", address)}
        return origin.partition("://")[2] not in addresses


def _find_name(address: str) -> str | None:
    """Return the name in an address such as "localhost:7860"; None where there is none."""
    try:
        return urlsplit(f"//{address}").hostname
    except ValueError:
        return None
