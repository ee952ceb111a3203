"""The files that a server's listing pages link to, in the forms that common servers write."""

import os
from collections.abc import Iterator
from html.parser import HTMLParser
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from labkit.core import is_hidden, strip_credentials
from labkit.data.blobs import HttpClient

_MAX_DEPTH = 32  # of folders: a link to its own folder would lead deeper without end


def key_url(top: SplitResult, key: str) -> str:
    """The URL of a key below a folder's URL. It keeps the folder's query, which may hold a signature."""
    return top._replace(path=top.path + quote(key, errors="surrogateescape")).geturl()


def list_files(client: HttpClient, top: SplitResult) -> list[str]:
    """Keys of the files below `top`, the URL of a folder; hidden ones are left out.

    Raises:
        OSError: a page cannot be fetched or parsed, or folders never end. Half the keys would be worse than none.
    """
    folders, seen = [""], {""}
    keys: list[str] = []
    while folders:
        folder = folders.pop()
        if folder.count("/") > _MAX_DEPTH:
            raise OSError(
                f"{strip_credentials(top.geturl())} lists folders without end (a link to its own folder?): pass keys="
            )
        new_keys = [key for key in dict.fromkeys(_linked_keys(client, top, folder)) if key not in seen]
        seen.update(new_keys)
        folders += [key for key in new_keys if key.endswith("/")]
        keys += [key for key in new_keys if not key.endswith("/")]
    return keys


def _linked_keys(client: HttpClient, top: SplitResult, folder: str) -> Iterator[str]:
    """Keys that a folder's page links to; folders end with a slash."""
    page = key_url(top, folder)
    answer = client.get(page)
    if answer.status != 200 or "html" not in answer.headers.get("Content-Type", ""):
        return
    parser = _LinkParser()
    try:
        parser.feed(answer.data.decode("utf-8", "replace"))
    except AssertionError as error:  # html.parser's answer to some broken markup
        raise OSError(f"{strip_credentials(page)} is not a readable listing ({error}): pass keys=") from error
    for link in parser.links:
        key = _key_below(top, page, link)
        if is_hidden(key) or "" in key.rstrip("/").split("/"):  # "": it leads elsewhere
            continue
        is_folder = not os.path.splitext(key)[1]
        yield key + "/" if is_folder and not key.endswith("/") else key


class _LinkParser(HTMLParser):
    """Collects the targets of links."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attributes if tag == "a" and name == "href" and value]


def _key_below(top: SplitResult, page: str, link: str) -> str:
    """The key that a link leads to; "" if it leads elsewhere."""
    try:
        target = urlsplit(urljoin(page, link))
        is_same_host = (target.hostname, target.port) == (top.hostname, top.port)
    except ValueError:  # not a URL
        return ""
    path, top_path = (unquote(url.path, errors="surrogateescape") for url in (target, top))
    is_below = target.scheme in ("http", "https") and is_same_host and path.startswith(top_path)
    return path.removeprefix(top_path) if is_below else ""
