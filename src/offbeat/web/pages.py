"""Owns what is not JSON: the page's own files, plotly's JavaScript, pages that say no, and the headers of them all.

Rules kept here:
- The way to the page's root is relative, so that a proxy may put the page below a prefix. Only the browser knows that
  prefix, so nothing that is sent to one begins with a slash.
"""

import gzip
import hashlib
import html
import mimetypes
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from aiohttp import web

from offbeat.server.refusals import KINDS, Refusal
from offbeat.web.run_reader import Stamp, stamp_of

STATIC = Path(str(resources.files("offbeat.web"))) / "static"
PAGE = "index.html"
PLOTLY = "plotly.min.js"
REFUSED = (STATIC.parent / "refused.html").read_text("utf-8")
POLICY = (
    # Plotly sets styles on what it draws, and saves pictures by way of data: and blob:. Nothing else is open.
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'self'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with no-referrer, browsers would say `Origin: null` of our own forms
    "Cache-Control": "no-store",
}
PACKED_FROM_BYTES = 1024
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
TEXT = ("text/", "application/json", "image/svg")


@dataclass(frozen=True, slots=True)
class Asset:
    stamp: Stamp
    body: bytes
    packed: bytes | None
    tag: str
    kind: str


class Assets:
    """The files of the page, kept in memory once they were asked for."""

    def __init__(self, folder: Path = STATIC) -> None:
        self.folder = folder.resolve()
        self._kept: dict[tuple[Path, str], Asset] = {}

    def load(self, name: str, root: str = "/") -> Asset:
        """A file, read and packed once; blocks. Addresses in it are given from `root` on."""
        path = self._path(name)
        stamp = None if path is None else stamp_of(path)
        if path is None or stamp is None:
            raise Refusal("not_found", f"there is no file {name[:100]!r}", do=_hint(name))
        kept = self._kept.get((path, root))
        if kept is None or kept.stamp != stamp:
            kept = self._kept[path, root] = _asset(path, stamp, root)
        return kept

    def _path(self, name: str) -> Path | None:
        if name == PLOTLY:
            return plotly_path()
        path = (self.folder / name).resolve()
        return path if path.is_relative_to(self.folder) and path.is_file() else None


def _asset(path: Path, stamp: Stamp, root: str) -> Asset:
    body = path.read_bytes()
    if root != "/":
        body = body.replace(b'="/', b'="' + root.encode())
    kind = TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    packed = gzip.compress(body, mtime=0) if kind.startswith(TEXT) and len(body) >= PACKED_FROM_BYTES else None
    return Asset(stamp, body, packed, f'"{hashlib.sha256(body).hexdigest()[:32]}"', kind)


def _hint(name: str) -> str:
    return "Install the page's charts: pip install 'offbeat[web]'." if name == PLOTLY else "Go to the start."


def plotly_path() -> Path | None:
    """Where plotly's package keeps its JavaScript; None where it is not installed."""
    try:
        package = resources.files("plotly")  # its code is not imported: it takes seconds, and is not needed
    except ModuleNotFoundError:
        return None
    path = Path(str(package)) / "package_data" / PLOTLY
    return path if path.is_file() else None


def root_from(path: str) -> str:
    """The page's root, as it is seen from a path.

    >>> root_from("/"), root_from("/updates"), root_from("/updates/3"), root_from("/runs/one/")
    ('./', './', '../', '../../')
    """
    return "../" * (path.count("/") - 1) or "./"


def root_of(request: web.Request) -> str:
    """The page's root, as it is seen from where the browser is."""
    return root_from(request.rel_url.raw_path)


def to(request: web.Request, path: str) -> web.Response:
    """The way to another page, given from the root; not an exception, because it may carry a cookie."""
    return web.Response(status=303, headers={"Location": root_of(request) + path.removeprefix("/")})


def sent(asset: Asset, request: web.Request) -> web.Response:
    """A file, or word that the browser's copy is still good."""
    headers = {"ETag": asset.tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if request.headers.get("If-None-Match") == asset.tag:
        return web.Response(status=304, headers=headers)
    response = packed(request, asset.body, asset.packed, asset.kind)
    response.headers.update(headers)
    return response


def packed(request: web.Request, body: bytes, smaller: bytes | None, kind: str) -> web.Response:
    """A response whose body is compressed for browsers that accept that."""
    charset = "utf-8" if kind.startswith("text/") else None
    if smaller is None or "gzip" not in request.headers.get("Accept-Encoding", ""):
        return web.Response(body=body, content_type=kind, charset=charset)
    headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return web.Response(body=smaller, content_type=kind, charset=charset, headers=headers)


def refused_page(refusal: Refusal, root: str) -> web.Response:
    """A refusal as a page; `root` leads to the start."""
    do = str(refusal.facts.get("do", KINDS[refusal.error].do))
    words = {"status": str(refusal.status), "message": refusal.message, "do": do, "root": root}
    text = REFUSED.format_map({name: html.escape(word) for name, word in words.items()})
    return web.Response(text=text, status=refusal.status, content_type="text/html")
