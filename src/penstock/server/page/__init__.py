"""The page that a server shows at `/`: static files, read and compressed once.

Nothing is built and nothing is loaded from elsewhere. The page talks to the server it came from
by relative addresses, so it also works below a path of a reverse proxy. See docs/page.md.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files as resources
from types import MappingProxyType
from typing import Final, NamedTuple

CONTENT_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}

HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Content-Security-Policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
            "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "Cache-Control": "no-cache",  # kept, but asked for again with its ETag
        "Referrer-Policy": "no-referrer",
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
    }
)
"""To be sent with every file of the page."""


class PageFile(NamedTuple):
    """One static file."""

    body: bytes
    content_type: str
    etag: str  # as it stands in the header; weak, since both forms of the body have it
    gzipped: bytes  # for a client that accepts `Content-Encoding: gzip`


@cache
def files() -> Mapping[str, PageFile]:
    """URL path → file: `/` is index.html, the others are `/page/<name>`."""
    found: dict[str, PageFile] = {}
    for entry in sorted(resources(__name__).iterdir(), key=lambda entry: entry.name):
        content_type = CONTENT_TYPES.get(entry.name.rpartition(".")[2])
        if content_type is None:
            continue
        body = entry.read_bytes()
        path = "/" if entry.name == "index.html" else f"/page/{entry.name}"
        etag = f'W/"{hashlib.sha256(body).hexdigest()[:32]}"'
        found[path] = PageFile(body, content_type, etag, gzip.compress(body, mtime=0))
    return MappingProxyType(found)
