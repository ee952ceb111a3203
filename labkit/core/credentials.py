"""Addresses and texts fit to be shown and stored: without users, passwords and signed queries."""

import re

# `user:password@`, up to the last @ before the path.
_USER = re.compile(r"(?<=://)[^\s/?#\"<>]*@")
# A password with a slash or a question mark in it: behind a colon that begins no port, up to the last @ there is.
_ODD_USER = re.compile(r"(?<=://)[^\s/?#\[:\"<>]*:(?!\d*(?:[/?#\s\"'<>)\]]|$))[^\s\"<>]*@")
_QUERY = re.compile(r"(?<=://)([^\s?\"'<>]*)\?[^\s\"'<>]*")
_NAMED = re.compile(
    r"(x-amz-[a-z-]+|[a-z_-]*(?:signature|token|password|secret|credential|access_?key(?:_?id)?)|\bsig)=[^\s&\"',)]+",
    re.IGNORECASE,
)


def strip_credentials(url: str) -> str:
    """An address without user, password, query and fragment: a query may hold a signature."""
    return re.split(r"[?#]", _without_user(url), maxsplit=1)[0]


def redact(text: str, secrets: tuple[str, ...] = ()) -> str:
    """A text of somebody else's, such as another library's error, without what its addresses keep secret.

    Args:
        text: Addresses in it lose user, password and query; `token=...` and its like lose what they say.
        secrets: Strings that must not be in it either.
    """
    for secret in filter(None, secrets):
        text = text.replace(secret, "...")
    return _NAMED.sub(r"\1=...", _QUERY.sub(r"\1?...", _without_user(text)) if "://" in text else text)


def contains_secret(error: BaseException, secrets: tuple[str, ...] = ()) -> bool:
    """Whether the text of an exception, or of one that it was raised from, would be changed by `redact`."""
    chained: BaseException | None = error
    while chained is not None:
        if redact(str(chained), secrets) != str(chained):
            return True
        chained = chained.__cause__ or chained.__context__
    return False


def _without_user(text: str) -> str:
    return _USER.sub("", _ODD_USER.sub("", text))
