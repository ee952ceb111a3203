"""Links of the repository's texts, as they are on a page of the site: to another page, to the repository, or none."""

import re
from dataclasses import dataclass
from posixpath import normpath

_LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+)\)")
_CODE = re.compile(r"^(```+|~~~+).*?^\1|`[^`\n]*\]\([^`\n]*`", re.MULTILINE | re.DOTALL)
_KEPT = re.compile(r"[a-z][a-z0-9+.-]*:|[#/]")  # elsewhere, on the same page, or a page already
RECORDS, PAGES = "tests/hardening/records", "labkit/lab/site/pages"


@dataclass(frozen=True)
class Addresses:
    """Where a link may lead.

    Args:
        notebooks: Names of the notebooks that have a page.
        pages: Names of the Markdown pages, without suffix.
        repository: Address of the project, or None.
    """

    notebooks: frozenset[str]
    pages: frozenset[str]
    repository: str | None = None

    def localized(self, markdown: str, folder: str = "") -> str:
        """The text with its relative links changed to lead to pages; one that leads nowhere becomes its words.

        Args:
            markdown: A text whose links are relative to `folder`.
            folder: Of the text, relative to the repository's top, or the site's: `"notebooks"`, `"pages"`.
        """
        parts, end = [], 0
        for code in _CODE.finditer(markdown):  # is left as it is
            parts += [self._linked(markdown[end : code.start()], folder), code[0]]
            end = code.end()
        return "".join([*parts, self._linked(markdown[end:], folder)])

    def _linked(self, markdown: str, folder: str) -> str:
        return _LINK.sub(lambda link: self._changed(link["text"], link["target"], folder), markdown)

    def _changed(self, text: str, target: str, folder: str) -> str:
        if _KEPT.match(target):
            return f"[{text}]({target})"
        path, hash_sign, anchor = target.partition("#")
        place = re.sub(r"^(\.\./)+", "", normpath(f"{folder}/{path}")) if folder else normpath(path)
        if page := self._page_of(place):
            keeps_anchor = anchor and page.startswith(
                ("/pages/", "/robustness")
            )  # Jupyter spells its anchors otherwise
            return f"[{text}]({page}#{anchor})" if keeps_anchor else f"[{text}]({page})"
        if self.repository:
            kind = "blob" if "." in place.rpartition("/")[2] else "tree"
            return f"[{text}]({self.repository}/{kind}/main/{place}{hash_sign}{anchor})"
        return text

    def _page_of(self, place: str) -> str:
        """The page that shows a file of the repository, from the site's top; "" if none does."""
        folder, _, name = place.rpartition("/")
        stem = name.partition(".")[0]
        if folder == "notebooks":
            if stem == "glossary":
                return "/glossary.md"
            return f"/notebooks/{name}" if stem in self.notebooks and name.endswith(".ipynb") else ""
        if place in ("README.md", ""):
            return "/index.md"
        if place in (RECORDS, f"{RECORDS}/README.md"):
            return "/robustness.md"
        return f"/pages/{stem}.md" if folder in ("pages", PAGES) and stem in self.pages else ""
