"""The checks of the exercises in notebook 13: other loaders."""

from itertools import product
from typing import Any

import pandas as pd

from labkit.peers import JPEG_FILES, JPEG_PACKED, RAW_PIXELS
from labkit.teach.exercises import exercise, judge, near


@exercise("13.1")
def cores_that_a_loader_keeps_busy(answer: Any) -> str | None:
    """A number of cores."""
    return near(answer, 0.8 / 1000 * 8000)


@exercise("13.2")
def room_below_the_limit(answer: Any) -> str | None:
    """A number: rate after, over rate now."""
    return near(answer, 3100 / 2600)


@exercise("13.3")
def may_be_compared(answer: Any) -> str | None:
    """A function of two pairs (source, antialias) that returns True or False."""
    loaders = list(product((JPEG_FILES, JPEG_PACKED, RAW_PIXELS), (True, False, None)))
    for one, other in product(loaders, repeat=2):
        same_source = (one[0] == RAW_PIXELS) == (other[0] == RAW_PIXELS)
        expected = same_source and (one[1] == other[1] or None in (one[1], other[1]))
        found = answer(one, other)
        if bool(found) != expected:
            return f"{one} and {other} {'may' if expected else 'may not'} be compared; it says {found!r}"
    return None


@exercise("13.4")
def a_peer_of_your_own(answer: Any) -> str | None:
    """A frame from lk.compare_peers(peers=[...]) with a loader that is not in lk.PEERS, or is changed."""
    wrong = judge(answer, rounds=3, widest=0.5)
    if wrong:
        return wrong
    if not {"kind", "source", "antialias"} <= set(answer.columns):
        return "it does not say what its variants read and how they resample: let lk.compare_peers make it"
    own = answer.loc[answer["kind"] == "peer", "variant"]
    return None if len(own) else f"no peer has run: {_left_out(answer)}"


def _left_out(frame: pd.DataFrame) -> str:
    rows = frame.attrs.get("left_out", [])
    return "; ".join(f"{row['name']} {row['state']}: {row['why']}" for row in rows) or "none was asked for"
