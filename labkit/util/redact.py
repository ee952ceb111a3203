"""Remove users, passwords and signed queries from URLs and messages before they are shown or stored."""

import re

# `user:password@`, up to the last @ before the path.
_USER = re.compile(r"(?<=://)[^\s/?#\"<>]*@")
# A password that contains a slash or question mark: after a colon that does not begin a port, up to the last @.
_USER_WITH_SEPARATORS = re.compile(r"(?<=://)[^\s/?#\[:\"<>]*:(?!\d*(?:[/?#\s\"'<>)\]]|$))[^\s\"<>]*@")
_QUERY = re.compile(r"(?<=://)([^\s?\"'<>]*)\?[^\s\"'<>]*")
_NAMED_SECRET = re.compile(
    r"(x-amz-[a-z-]+|[a-z_-]*(?:signature|token|password|secret|credential|access_?key(?:_?id)?)|\bsig)=[^\s&\"',)]+",
    re.IGNORECASE,
)


def strip_credentials(url: str) -> str:
    """A URL without user, password, query and fragment; a query may contain a signature."""
    return re.split(r"[?#]", _remove_user(url), maxsplit=1)[0]


def redact(text: str) -> str:
    """A message from elsewhere, such as another library's error, without credentials.

    URLs in it lose user, password and query; `token=...` and the like lose their values.
    """
    return _NAMED_SECRET.sub(r"\1=...", _QUERY.sub(r"\1?...", _remove_user(text)) if "://" in text else text)


def contains_secret(error: BaseException | None) -> bool:
    """Whether `redact` would change the text of an exception, or of one that it was raised from."""
    if error is None:
        return False
    return redact(str(error)) != str(error) or contains_secret(error.__cause__ or error.__context__)


def _remove_user(text: str) -> str:
    return _USER.sub("", _USER_WITH_SEPARATORS.sub("", text))
