"""Which images a server's listing pages lead to, as common servers write such pages."""

import os
from collections.abc import Iterator
from html.parser import HTMLParser
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from labkit.core import is_image, strip_credentials
from labkit.data.blobs import HttpClient

_DEEPEST = 32  # folders below the first: a link to its own folder would lead on for ever


def key_url(top: SplitResult, key: str) -> str:
    """The address of a key below a folder's address; a query, which may hold a signature, goes with it."""
    return top._replace(path=top.path + quote(key, errors="surrogateescape")).geturl()


def list_images(client: HttpClient, top: SplitResult) -> list[str]:
    """Keys of the images below `top`, the address of a folder.

    Raises:
        OSError: a page that cannot be fetched or is no HTML, or folders without end: half the keys would be worse
            than none.
    """
    folders, seen, keys = [""], {""}, []
    while folders:
        folder = folders.pop()
        if folder.count("/") > _DEEPEST:
            raise OSError(
                f"{strip_credentials(top.geturl())} lists folders without end (a link to its own folder?): pass keys="
            )
        for key in _linked(client, top, folder):
            if key in seen:
                continue
            seen.add(key)
            if key.endswith("/"):
                folders.append(key)
            elif is_image(key):
                keys.append(key)
    return keys


def _linked(client: HttpClient, top: SplitResult, folder: str) -> Iterator[str]:
    """Keys that a folder's page leads to; folders end with a slash."""
    page = key_url(top, folder)
    answer = client.get(page)
    if answer.status != 200 or "html" not in answer.headers.get("Content-Type", ""):
        return
    for link in _links(answer.data.decode("utf-8", "replace"), page):
        key = _below(top, page, link)
        parts = key.rstrip("/").split("/")
        if any(part[:1] in ("", ".") for part in parts):  # elsewhere, or hidden
            continue
        is_folder = not is_image(key) and not os.path.splitext(key)[1]
        yield key + "/" if is_folder and not key.endswith("/") else key


def _below(top: SplitResult, page: str, link: str) -> str:
    """The key that a link leads to; "" where it leads elsewhere."""
    try:
        target = urlsplit(urljoin(page, link))
    except ValueError:  # no address at all
        return ""
    path, above = (unquote(part.path, errors="surrogateescape") for part in (target, top))
    here = target.scheme in ("http", "https") and _host(target) == _host(top) and path.startswith(above)
    return path.removeprefix(above) if here else ""


def _host(url: SplitResult) -> str:
    return url.netloc.rpartition("@")[2]


def _links(text: str, page: str) -> list[str]:
    try:
        return _Links(text).found
    except AssertionError as error:  # what Python's parser has for some markup that is none
        raise OSError(f"{strip_credentials(page)} is no listing that can be read ({error}): pass keys=") from error


class _Links(HTMLParser):
    """The addresses that a page leads to."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attributes if tag == "a" and name == "href" and value]
