"""Owns the way from any path to the page's root: relative, so that a proxy may put the page below a prefix.

Only the browser knows that prefix. So nothing that is sent to one begins with a slash.
"""

from aiohttp import web


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
