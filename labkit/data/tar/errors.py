"""What goes wrong with a tar, said the same way everywhere."""


class TarError(OSError):
    """A file that is not a whole tar, or not one that can be read this way; names the file and the remedy."""


class TarWarning(UserWarning):
    """A tar that can be read, but may not be whole."""


def damage_error(name: str, problem: object, last_whole: str | None = None) -> TarError:
    """The error for a tar that is cut or damaged.

    Args:
        name: The tar.
        problem: What was found, text or exception.
        last_whole: The last member known to be whole, "" if none is, None if that is unknown.
    """
    if last_whole is None:
        return TarError(f"{name} is cut or damaged ({problem}): copy or download it again")
    found = f"the last whole member is {last_whole!r}" if last_whole else "no member is whole"
    return TarError(f"{name} is cut or damaged ({problem}): {found}. Copy or download it again")


def not_a_tar_error(name: str, problem: object) -> TarError:
    """The error for a file whose first header cannot be read."""
    return TarError(
        f"{name} is not a tar, or is cut or damaged ({problem}): no member is whole. Copy or download it again"
    )
