"""The page at ``/``: its files, from memory, with a policy that lets them load nothing from anywhere else."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

FOLDER = Path(__file__).parent / "static"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    # Asked for anew each time, and answered 304 where nothing has changed.
    "cache-control": "no-cache",
}


class _File:
    """A file of the page as it is sent."""

    def __init__(self, path: Path) -> None:
        self._body = path.read_bytes()
        etag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'
        self._headers = HEADERS | {"etag": etag, "content-type": _TYPES[path.suffix]}

    def response(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, headers=self._headers)


def add_page(app: FastAPI) -> None:
    """Serve the page at ``/`` and its files below ``/static/``. They are read once, here."""
    files = {path.name: _File(path) for path in FOLDER.iterdir() if path.suffix in _TYPES}

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return files["index.html"].response(request)

    @app.get("/static/{name}", include_in_schema=False)
    async def static(request: Request, name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return files[name].response(request)
