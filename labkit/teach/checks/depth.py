"""The checks of the exercises in notebook 09: Marigold's storage."""

from typing import Any

from labkit.teach.exercises import exercise, frame_exercise, number_exercise

_FILES, _SEEK_MS = 107_770, 8

number_exercise("09.1", "A number, in minutes.", _FILES * _SEEK_MS / 1e3 / 60)
number_exercise("09.2", "A whole number of scans.", 2 * 10, tolerance=0)
number_exercise("09.3", "A number: the old time over the new.", 4.0 / (4.0 - 0.1), tolerance=0.002)
frame_exercise("09.5", "A frame from lk.compare.", rounds=3, widest=0.5, speedup=1.2)


@exercise("09.4")
def check_mirrored_columns(answer: Any) -> str | None:
    """A function of (width, new_width) that returns a list of column numbers."""
    for width, new_width in ((1024, 640), (8, 8), (9, 4), (6, 12)):
        kept = [(2 * column + 1) * width // (2 * new_width) for column in range(new_width)]
        expected = [width - 1 - column for column in kept]
        found = [int(column) for column in answer(width, new_width)]
        if len(found) != new_width:
            return f"for {width} -> {new_width} it returned {len(found)} columns"
        wrong = [column for column in range(new_width) if found[column] != expected[column]]
        if wrong:
            first = f"the first at {wrong[0]}: {found[wrong[0]]} instead of {expected[wrong[0]]}"
            return f"for {width} -> {new_width}, {len(wrong)} of {new_width} columns are wrong, {first}"
    return None
