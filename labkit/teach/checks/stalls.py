"""The checks of the exercises in notebook 12: finding the stall."""

from typing import Any

from labkit.measure import summarize
from labkit.teach.exercises import exercise, judge, near, reaches


@exercise("12.1")
def ceiling_of_a_training(answer: Any) -> str | None:
    """A number: the rate with free data over the rate now."""
    return near(answer, 200 / 80)


@exercise("12.2")
def workers_for_a_step(answer: Any) -> str | None:
    """A whole number of workers."""
    return near(answer, 240 / 40, tolerance=0)


@exercise("12.3")
def seconds_of_an_iteration(answer: Any) -> str | None:
    """A number, in seconds."""
    return near(answer, 16 * 2 / 40)


@exercise("12.4")
def share_that_is_lost(answer: Any) -> str | None:
    """A function of (step_s, loader_s, together_s) that returns a number from 0 to 1."""
    for step_s, loader_s, together_s in ((0.08, 0.2, 0.2), (0.08, 0.01, 0.08), (0.05, 0.05, 0.1), (0.1, 0.02, 0.098)):
        expected = max(0.0, 1 - step_s / together_s)
        found = float(answer(step_s, loader_s, together_s))
        if abs(found - expected) > 1e-6:
            return (
                f"step {step_s} s, loader {loader_s} s, both {together_s} s: {found:.3f} is not the {expected:.3f} lost"
            )
    return None


@exercise("12.5")
def a_stall_that_was_cured(answer: Any) -> str | None:
    """A frame from lk.compare with two loaders before one step, and the variant "step alone"."""
    wrong = judge(answer, rounds=3, widest=0.5)
    if wrong:
        return wrong
    if "step alone" not in set(answer["variant"]):
        return 'it has no variant "step alone": without it nobody sees what could be reached'
    if len(set(answer["variant"])) < 3:
        return "it has one loader only; two are compared"
    loaders, ceiling = answer[answer["variant"] != "step alone"], summarize(answer).loc["step alone", "ci_high"]
    best = summarize(loaders)["speedup"].max()
    if best > ceiling:
        return f"a loader reaches {best:.2f}x, more than the {ceiling:.2f}x of the step alone: not the same step"
    return reaches(loaders, 1.2)
