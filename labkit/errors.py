"""Every error that labkit raises itself: `except labkit.LabkitError` catches them all.

Each also is one of Python's own, so that `except ValueError` and the like work as expected. Its message says what was
given, what is accepted, and what to do. Errors of the system and of other libraries pass as they are.
"""


class LabkitError(Exception):
    """The root of all errors of labkit.

    >>> try:
    ...     lk.FolderStore("no such folder")
    ... except lk.LabkitError as error:
    ...     print(type(error).__name__)
    MissingFileError
    """


class ArgumentError(LabkitError, ValueError):
    """An argument, an input or a file has a value that is not accepted; says which are."""


class WrongTypeError(LabkitError, TypeError):
    """An argument has a type that is not accepted; says which are."""


class OperationError(LabkitError, RuntimeError):
    """What was asked for cannot be done in this state; says what to do."""


class StorageError(LabkitError, OSError):
    """A file, disk or server did not do what was asked of it; names it and the remedy."""


class MissingFileError(LabkitError, FileNotFoundError):
    """A file, folder or address that was asked for does not exist; names it."""


class FolderError(LabkitError, IsADirectoryError):
    """A folder where a file is asked for; names it and the remedy."""


class MissingKeyError(LabkitError, KeyError):
    """A key that was asked for is not in the store; names it."""

    __str__ = Exception.__str__  # KeyError's shows the message in quotes


class MissingLibraryError(LabkitError, ImportError):
    """An optional library is missing; names the command that installs it."""


class DecodeError(LabkitError, ValueError):
    """`data` is not a complete image of a format that labkit reads; names the key, the decoder and the cause.

    >>> try:
    ...     lk.decode(b"no image", key="cat/1.jpg")
    ... except lk.DecodeError as error:
    ...     print(str(error)[:25])
    cat/1.jpg: turbojpeg cann
    """


class NothingLeft(DecodeError):
    """Every image of a batch was skipped, so that there is no batch; the message has the first one's reason."""


class UnsafeTarError(LabkitError, ValueError):
    """A member that would leave its folder, or is not a file, folder or link. Nothing of the archive is extracted."""


class PixelError(LabkitError, ValueError):
    """A file that is not a pixel store, is damaged, or holds other pixels; the message names it and the remedy."""


class TarError(StorageError):
    """A file that is not a whole tar, or not one that can be read this way; names the file and the remedy."""


class WorkerDied(LabkitError, RuntimeError):
    """A worker process ended without an error of its own: killed by the system, or crashed in native code."""


class VariantError(LabkitError, RuntimeError):
    """A variant raised or yielded nothing; the message names it as `label` does, the cause is chained."""

    def __init__(self, message: str, label: str = ""):
        super().__init__(message)
        self.label = label


class GilError(LabkitError, RuntimeError):
    """The lock cannot be watched here; the message says why, and what to do."""


class PeerError(LabkitError):
    """A loader does not do the work; the message says what is wrong."""


class HostError(LabkitError):
    """What went wrong in a host, in one line."""


_MAX_LISTED_FAILURES = 10


class ItemErrors(LabkitError, RuntimeError):
    """Some items failed; all others are done.

    failures: key of the item -> error text, in the order of the items.
    results: list as `map_items` would have returned it, None where an item failed.
    """

    def __init__(self, failures: dict[str, str], results: list):
        super().__init__(failures, results)  # unchanged, so that the error can be pickled
        self.failures, self.results = failures, results

    def __str__(self) -> str:
        listed = "; ".join(f"{key}: {text}" for key, text in list(self.failures.items())[:_MAX_LISTED_FAILURES])
        n_more = len(self.failures) - _MAX_LISTED_FAILURES
        more = f"; and {n_more} more (see .failures)" if n_more > 0 else ""
        others = ", the others are done" if len(self.failures) < len(self.results) else ""
        return f"{len(self.failures)} of {len(self.results)} items failed{others}: {listed}{more}"


class NothingSeen(LabkitError, ValueError):
    """No loader of torch's or labkit's gave two batches while it was watched."""


class CannotRun(LabkitError, ValueError):
    """There is no such script or module; the message says what was looked for."""


class CannotDiagnose(LabkitError, ValueError):
    """The arguments are not a loader and a step; the message tells what is needed."""
