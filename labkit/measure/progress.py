"""One live progress bar for all long work: a widget in a notebook, a line in a shell."""

from typing import Any

from tqdm.auto import tqdm


def progress_bar(iterable: Any = None, *, show: bool = True, **options: Any) -> tqdm:
    """A `tqdm.auto` bar that vanishes when done; `TQDM_DISABLE=1` silences it, as it does every tqdm bar."""
    # An explicit disable=False would overrule the variable, so it is only ever set to True.
    return tqdm(iterable, leave=False, **options, **({} if show else {"disable": True}))
