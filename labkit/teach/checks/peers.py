"""The checks of the exercises in notebook 13: other loaders."""

from itertools import product
from typing import Any

from labkit.peers import JPEG_FILES, JPEG_PACKED, RAW_PIXELS
from labkit.teach.exercises import exercise, frame_error, number_exercise

number_exercise("13.1", "A number of cores.", 0.8 / 1000 * 8000)
number_exercise("13.2", "A number: rate after, over rate now.", 3100 / 2600)


@exercise("13.3")
def check_comparable(answer: Any) -> str | None:
    """A function of two pairs (source, antialias) that returns True or False."""
    loaders = list(product((JPEG_FILES, JPEG_PACKED, RAW_PIXELS), (True, False, None)))
    for one, other in product(loaders, repeat=2):
        same_source = (one[0] == RAW_PIXELS) == (other[0] == RAW_PIXELS)
        expected = same_source and (one[1] == other[1] or None in (one[1], other[1]))
        found = answer(one, other)
        if bool(found) != expected:
            return f"{one} and {other} {'may' if expected else 'may not'} be compared; it returned {found!r}"
    return None


@exercise("13.4")
def check_own_peer(answer: Any) -> str | None:
    """A frame from lk.compare_peers(peers=[...]) with a loader that is not in lk.PEERS, or is changed."""
    error = frame_error(answer, rounds=3, widest=0.5)
    if error:
        return error
    if not {"kind", "source", "antialias"} <= set(answer.columns):
        return "it does not say what its variants read and how they resample: make it with lk.compare_peers"
    if (answer["kind"] == "peer").any():
        return None
    left_out = [f"{row['name']} {row['state']}: {row['why']}" for row in answer.attrs.get("left_out", [])]
    return f"no peer has run: {'; '.join(left_out) or 'none was given'}"
