"""The checks of the exercises in notebooks 12 to 15: finding the stall, other loaders, claims, at scale."""

from itertools import combinations_with_replacement, product
from typing import Any

from labkit.measure import summarize
from labkit.peers import JPEG_FILES, JPEG_PACKED, RAW_PIXELS
from labkit.teach.claims import (
    FAILS,
    HOLDS,
    LARGER,
    MISSING,
    NEEDS_GPU,
    OPEN,
    Reading,
    agreeing_range,
    reaches,
    together,
)
from labkit.teach.exercises import exercise, expect, expect_frame, expect_runs, expect_settled, number_exercise
from labkit.tuning.plan import LoaderCosts, Plan

number_exercise("12.1", "A number: the rate with free data over the rate now.", 200 / 80)
number_exercise("12.2", "A whole number of workers.", 240 / 40, tolerance=0)
number_exercise("12.3", "A number, in seconds.", 16 * 2 / 40)
number_exercise("13.1", "A number of cores.", 0.8 / 1000 * 8000)
number_exercise("13.2", "A number: rate after, over rate now.", 3100 / 2600)
number_exercise("14.1", "A number: how many times as fast.", 4.6 / 3.9)
number_exercise("15.1", "A number of requests.", 8 * 2500 * 0.150)

_WORTH_IT = 1.2  # the speed-up that is asked for


@exercise("12.4")
def check_lost_share(answer: Any) -> None:
    """A function of (step_s, loader_s, together_s) that returns a number from 0 to 1."""
    for step_s, loader_s, together_s in ((0.08, 0.2, 0.2), (0.08, 0.01, 0.08), (0.05, 0.05, 0.1), (0.1, 0.02, 0.098)):
        lost, found = max(0.0, 1 - step_s / together_s), float(answer(step_s, loader_s, together_s))
        case = f"step {step_s} s, loader {loader_s} s, both {together_s} s"
        expect(abs(found - lost) <= 1e-6, f"{case}: {lost:.3f} is lost; it returned {found:.3f}")


@exercise("12.5")
def check_cured_stall(answer: Any) -> None:
    """A frame from lk.compare with two loaders before one step, and the variant "step alone"."""
    expect_runs(answer)
    variants = set(answer["variant"])
    expect("step alone" in variants, 'it has no variant "step alone": without it, nobody can see what is possible')
    loaders, ceiling = answer[answer["variant"] != "step alone"], summarize(answer).loc["step alone"]
    expect(ceiling["verdict"] != "baseline", "its baseline is the step alone; make a loader the baseline")
    best, most = summarize(loaders)["speedup"].max(), ceiling["ci_high"]
    too_fast = f"a loader reaches {best:.2f}x, more than the {most:.2f}x of the step alone: not the same step"
    expect(best <= most, too_fast)
    if most < _WORTH_IT:  # no loader can bring more
        return
    expect(len(variants) > 2, f"it has only one loader; two are needed, since the step alone may reach {most:.2f}x")
    half_of_it = 1 + max(0, ceiling["speedup"] - 1) / 2
    expect_frame(loaders, widest=1, speedup=round(min(_WORTH_IT, half_of_it), 2))


@exercise("13.3")
def check_comparable(answer: Any) -> None:
    """A function of two pairs (source, antialias) that returns True or False."""
    loaders = list(product((JPEG_FILES, JPEG_PACKED, RAW_PIXELS), (True, False, None)))
    for one, other in product(loaders, repeat=2):
        same_source = (one[0] == RAW_PIXELS) == (other[0] == RAW_PIXELS)
        expected = same_source and (one[1] == other[1] or None in (one[1], other[1]))
        found, may = answer(one, other), "may" if expected else "may not"
        expect(bool(found) == expected, f"{one} and {other} {may} be compared; it returned {found!r}")


@exercise("13.4")
def check_own_peer(answer: Any) -> None:
    """A frame of your loader, from lk.compare_peers(peers=[...]) or from lk.compare with source= and antialias=."""
    expect_settled(answer, speedup=1.1)
    has_class = {"source", "antialias"} <= set(answer.columns)
    remedy = "make it with lk.compare_peers, or pass lk.compare source= and antialias="
    expect(has_class, f"it does not say what its variants read and how they resample: {remedy}")
    left_out = [f"{row['name']} {row['state']}: {row['why']}" for row in answer.attrs.get("left_out", [])]
    has_peer = "kind" not in answer or (answer["kind"] == "peer").any()
    expect(has_peer, f"no peer has run: {'; '.join(left_out) or 'none was given'}")


@exercise("14.2")
def check_ratio_verdict(answer: Any) -> None:
    """A function of (low, high, claimed, up_to) that returns the outcome for a claimed range of ratios."""
    intervals = ((2.2, 2.4), (1.4, 2.6), (1.2, 1.4), (1.01, 1.04), (0.8, 1.03), (0.9, 2.5), (0.5, 0.8), (3.5, 300.0))
    for (claimed, up_to), (low, high) in product(((1.3, 2.0), (1.1, 1.1), (2.0, 2.0)), intervals):
        expected = reaches(Reading(low=low, high=high), agreeing_range(claimed, up_to))
        found = answer(low, high, claimed, up_to)
        case = f"[{low}, {high}] against {claimed}x to {up_to}x"
        expect(found == expected, f"{case} should give {expected!r}; it gave {found!r}")


@exercise("14.3")
def check_claim_verdict(answer: Any) -> None:
    """A function of a list of outcomes that returns the verdict on the claim."""
    for size in (1, 2, 3):
        for outcomes in combinations_with_replacement((HOLDS, LARGER, FAILS, OPEN, NEEDS_GPU, MISSING), size):
            expected, found = together(outcomes), answer(list(outcomes))
            expect(found == expected, f"the outcomes {list(outcomes)} should give {expected!r}; it gave {found!r}")


@exercise("14.4")
def check_own_claim(answer: Any) -> None:
    """Three things: a frame from lk.compare with two variants, the claimed ratio, and your verdict."""
    is_triple = isinstance(answer, tuple | list) and len(answer) == 3
    expect(is_triple, "pass three things: (frame, claimed ratio, verdict)")
    frame, claimed, verdict = answer
    others = expect_runs(frame, rounds=5)
    expect(len(others) == 1, f"it compares {len(others)} variants with the baseline; one is needed")
    expect(claimed > 1, f"the claimed ratio is {claimed}; one above 1 is needed: make the other variant the baseline")
    low, high = others.iloc[0][["ci_low", "ci_high"]]
    expected, case = reaches(Reading(low=low, high=high), agreeing_range(claimed)), f"[{low:.2f}, {high:.2f}]"
    expect(expected != OPEN, f"{case} does not settle a claim of {claimed}x: measure longer")
    expect(verdict == expected, f"{case} against {claimed}x gives {expected!r}, not {verdict!r}")


@exercise("15.2")
def check_own_costs(answer: Any) -> None:
    """What lk.loader_costs measured of your photos."""
    expect(isinstance(answer, LoaderCosts), f"it is a {type(answer).__name__}; lk.loader_costs gives LoaderCosts")
    expect("photos" in answer.by_data, "it holds nothing about your photos")
    cost = answer.by_data["photos"]["cpu_ms_per_image"]
    expect(cost.kind == "measured here", f"its core time was {cost.kind}, not measured")
    width = (cost.interval[1] - cost.interval[0]) / cost.value
    wide = f"the interval of its core time is {width:.0%} wide: measure again, quietly or with more rounds"
    expect(width <= 0.3, wide)


@exercise("15.3")
def check_own_plan(answer: Any) -> None:
    """An lk.Plan of your own cluster."""
    expect(isinstance(answer, Plan), f"it is a {type(answer).__name__}; lk.plan gives a Plan")
    kinds = {name: each.kind for name, each in answer.setup.inputs.items()}
    for name, remedy in (
        ("images_per_s_per_gpu", "pass lk.plan your own images/s, or an lk.diagnose of your loader and step"),
        ("cpu_ms_per_image", "pass costs=lk.loader_costs(FOLDER) of your photos"),
        ("cores_per_node", "pass the cores_per_node of your machines"),
    ):
        is_own = kinds[name] in ("measured here", "entered")
        expect(is_own, f"its {name} is {kinds[name]}: {remedy}")


@exercise("15.4")
def check_own_storage(answer: Any) -> None:
    """A frame from lk.compare of two numbers of requests in flight to your storage."""
    expect_settled(answer, speedup=_WORTH_IT)
