"""The web pages, which are static files: a chat and a live view at `/`, the API at `/docs`.

Owns the files' bytes and their headers. The pages use the same endpoints as other clients. The files contain no
secrets, so they need no key.
"""

import hashlib
from pathlib import Path

from starlette.types import Receive, Scope, Send

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
# Only what the pages need: no other origin, no inline script, no frame around them.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

PAGE_FILES = {
    "/": "index.html",
    "/page/style.css": "style.css",
    "/page/icon.svg": "icon.svg",
    "/page/theme.js": "theme.js",
    "/page/main.js": "main.js",
    "/page/server.js": "server.js",
    "/page/chat.js": "chat.js",
    "/page/parameters.js": "parameters.js",
    "/page/markdown.js": "markdown.js",
    "/page/tokens.js": "tokens.js",
    "/page/engine.js": "engine.js",
    "/page/metrics.js": "metrics.js",
    "/docs": "docs.html",
    "/page/docs.css": "docs.css",
    "/page/docs.js": "docs.js",
}
"""Path → file."""


class PageFile:
    """Answers GET for one file, read once."""

    def __init__(self, name: str) -> None:
        """`name`: one of `PAGE_FILES`."""
        self._body = (_FOLDER / name).read_bytes()
        self._etag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'.encode()
        self._headers = [
            (b"content-type", _TYPES[Path(name).suffix]),
            (b"etag", self._etag),
            (b"cache-control", b"no-cache"),  # cached but validated each time, so that a new version shows at once
            (b"content-security-policy", _POLICY),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = dict(scope["headers"]).get(b"if-none-match", b"").split(b",")
        if self._etag in (tag.strip().removeprefix(b"W/") for tag in known):  # compressing proxies weaken the tag
            await send({"type": "http.response.start", "status": 304, "headers": self._headers})
            await send({"type": "http.response.body", "body": b""})
            return
        length = (b"content-length", str(len(self._body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [*self._headers, length]})
        await send({"type": "http.response.body", "body": self._body})
