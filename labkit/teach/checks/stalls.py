"""The checks of the exercises in notebook 12: finding the stall."""

from typing import Any

from labkit.measure import summarize
from labkit.teach.exercises import exercise, frame_error, number_exercise, speedup_error

number_exercise("12.1", "A number: the rate with free data over the rate now.", 200 / 80)
number_exercise("12.2", "A whole number of workers.", 240 / 40, tolerance=0)
number_exercise("12.3", "A number, in seconds.", 16 * 2 / 40)


@exercise("12.4")
def check_lost_share(answer: Any) -> str | None:
    """A function of (step_s, loader_s, together_s) that returns a number from 0 to 1."""
    for step_s, loader_s, together_s in ((0.08, 0.2, 0.2), (0.08, 0.01, 0.08), (0.05, 0.05, 0.1), (0.1, 0.02, 0.098)):
        expected = max(0.0, 1 - step_s / together_s)
        found = float(answer(step_s, loader_s, together_s))
        if abs(found - expected) > 1e-6:
            case = f"step {step_s} s, loader {loader_s} s, both {together_s} s"
            return f"{case}: {expected:.3f} is lost; it returned {found:.3f}"
    return None


@exercise("12.5")
def check_cured_stall(answer: Any) -> str | None:
    """A frame from lk.compare with two loaders before one step, and the variant "step alone"."""
    error = frame_error(answer, rounds=3, widest=0.5)
    if error:
        return error
    if "step alone" not in set(answer["variant"]):
        return 'it has no variant "step alone": without it, nobody can see what is possible'
    if len(set(answer["variant"])) < 3:
        return "it has only one loader; two are needed"
    loaders, ceiling = answer[answer["variant"] != "step alone"], summarize(answer).loc["step alone", "ci_high"]
    best = summarize(loaders)["speedup"].max()
    if best > ceiling:
        return f"a loader reaches {best:.2f}x, more than the {ceiling:.2f}x of the step alone: not the same step"
    return speedup_error(loaders, 1.2)
