"""The links of a built site: which lead nowhere, which leave it, and what a browser would fetch from elsewhere."""

import re
from collections import defaultdict
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_FETCHED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
_IN_CSS = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s]+)""")


class Page(HTMLParser):
    """A page: its anchors, and its links as pairs of tag and address."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.alts, self.text = set(), [], [], text
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.anchors |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        if tag == "img":
            self.alts.append(attributes.get("alt"))
        for name in ("href", "src"):
            if attributes.get(name) and not (tag == "link" and attributes.get("rel") in ("canonical", "author")):
                self.links.append((tag, attributes[name]))


class BuiltSite:
    """All pages under a folder."""

    def __init__(self, root):
        self.root = Path(root)
        self.pages = {path: Page(path.read_text()) for path in sorted(self.root.rglob("*.html"))}

    @cached_property
    def broken(self):
        """Page -> its links to a file or an anchor that is not there."""
        found = defaultdict(list)
        for path, page in self.pages.items():
            for _, address in page.links:
                if not _is_outside(address) and not self._leads_somewhere(path, address):
                    found[path.relative_to(self.root).as_posix()].append(address)
        return dict(found)

    @cached_property
    def external(self):
        """Addresses elsewhere that a reader may follow."""
        return {link for page in self.pages.values() for tag, link in page.links if tag == "a" and _is_outside(link)}

    @cached_property
    def fetched(self):
        """Addresses elsewhere that a browser would ask for without being told to."""
        tags = [(tag, link) for page in self.pages.values() for tag, link in page.links if tag in _FETCHED]
        styles = "".join(path.read_text() for path in self.root.rglob("*.css"))
        inline = "".join(page.text for page in self.pages.values())
        outside = {link for _, link in tags if _is_outside(link) and not link.startswith("data:")}
        return outside | set(_IN_CSS.findall(styles + inline))

    def _leads_somewhere(self, path, address):
        parts = urlsplit(address)
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not target.is_file() or not target.is_relative_to(self.root.resolve()):
            return False
        anchor = unquote(parts.fragment)
        return not anchor or target.suffix != ".html" or anchor in self.pages[target].anchors


def _is_outside(address):
    return bool(urlsplit(address).scheme or address.startswith("//"))
