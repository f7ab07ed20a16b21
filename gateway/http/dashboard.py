"""GET /: the live dashboard, one self-contained page that reads /stats every second."""

from __future__ import annotations

from importlib.resources import files

from aiohttp import web

__all__ = ["load_page", "routes"]

_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def load_page() -> bytes:
    """The page, from the package's own files."""
    return files("gateway.http").joinpath("static", "index.html").read_bytes()


def routes(page: bytes) -> list[web.RouteDef]:
    """The routes that serve ``page``."""

    async def dashboard(_: web.Request) -> web.Response:
        return web.Response(body=page, content_type="text/html", charset="utf-8", headers=_HEADERS)

    return [web.get("/", dashboard), web.get("/dashboard", dashboard)]
