"""The progress bar of all long tasks: a widget in a notebook, a line in a shell."""

import os
from typing import Any

from tqdm.auto import tqdm


def progress_bar(iterable: Any = None, *, show: bool = True, **options: Any) -> tqdm:
    """A `tqdm.auto` bar that disappears when done; `TQDM_DISABLE=1` hides it, like any tqdm bar."""
    # tqdm's notebook bar ignores the variable.
    silent = os.environ.get("TQDM_DISABLE", "0") not in ("", "0")
    return tqdm(iterable, leave=False, disable=silent or not show, **options)
