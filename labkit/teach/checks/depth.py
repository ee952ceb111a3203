"""The checks of the exercises in notebook 09: Marigold's storage."""

from typing import Any

from labkit.teach.exercises import exercise, judge, near, reaches

_FILES, _SEEK_MS = 107_770, 8


@exercise("09.1")
def minutes_of_a_scan(answer: Any) -> str | None:
    """A number, in minutes."""
    return near(answer, _FILES * _SEEK_MS / 1e3 / 60)


@exercise("09.2")
def scans_of_two_workers(answer: Any) -> str | None:
    """A whole number of scans."""
    return near(answer, 2 * 10, tolerance=0)


@exercise("09.3")
def what_a_folder_can_cure(answer: Any) -> str | None:
    """A number: the old time over the new."""
    return near(answer, 4.0 / (4.0 - 0.1), tolerance=0.002)


@exercise("09.4")
def columns_of_a_mirrored_picture(answer: Any) -> str | None:
    """A function of (width, new_width) that returns a list of column numbers."""
    for width, new_width in ((1024, 640), (8, 8), (9, 4), (6, 12)):
        kept = [(2 * column + 1) * width // (2 * new_width) for column in range(new_width)]
        expected = [width - 1 - column for column in kept]
        found = [int(column) for column in answer(width, new_width)]
        if len(found) != new_width:
            return f"for {width} -> {new_width} it returns {len(found)} columns"
        wrong = [column for column in range(new_width) if found[column] != expected[column]]
        if wrong:
            return (
                f"for {width} -> {new_width}, {len(wrong)} of {new_width} columns are wrong, the first at {wrong[0]}: "
                f"{found[wrong[0]]} instead of {expected[wrong[0]]}"
            )
    return None


@exercise("09.5")
def a_loader_that_pays(answer: Any) -> str | None:
    """A frame from lk.compare."""
    return judge(answer, rounds=3, widest=0.5) or reaches(answer, 1.2)
