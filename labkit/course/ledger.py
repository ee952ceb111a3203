"""The ledger of published claims: what each says, and the figure of these notebooks that answers it.

Claims and figures are theirs; ours are read from the notebooks' results. A claim about seconds on another machine is
judged as a ratio of two of its figures, or as a direction if it has only one.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pandas as pd

from labkit.course.results import Ratio, Result, known_results
from labkit.util.machine import NOTEBOOK_FOLDER

HOLDS = "holds"
CONDITION = "holds under a condition"
LARGER = "larger here"
SMALLER = "smaller here"
FAILS = "does not hold"
OPEN = "inconclusive"
NEEDS_GPU = "needs a GPU"
MISSING = "not measured yet"
UNTESTED = "not tested here"
VERDICTS = (HOLDS, CONDITION, LARGER, SMALLER, FAILS, OPEN, NEEDS_GPU, MISSING, UNTESTED)

GAIN_WITHIN = 2.0  # a claimed ratio of 3x is a gain of 2: half to twice that gain agrees with it, 2x to 5x
SAME_WITHIN = 1.05  # a claim of "no change" allows a change of a twentieth

_SIZES = "[sd-scripts #1493](https://github.com/kohya-ss/sd-scripts/issues/1493)"
_WORKERS = "[sd-scripts #1134](https://github.com/kohya-ss/sd-scripts/issues/1134)"
_MARIGOLD = "[Marigold #94](https://github.com/prs-eth/Marigold/issues/94)"
_DECODING = "*两步加速PyTorch DataLoader读取速度*, a write-up on several Chinese sites"
_PIPELINE = "a write-up on faster input pipelines, without a public address"
_TUTORIAL = "[PyTorch's tutorial](https://github.com/pytorch/tutorials/pull/3875)"


@dataclass(frozen=True)
class Test:
    """One setting in which a claim is tested.

    Args:
        setting: In words.
        notebook: The start of the name of the notebook that measures or shows it.
        figure: The name of its figure, as in the notebook's result; empty: a checked cell of the notebook shows it.
        holds: What that cell shows, where there is no figure.
    """

    setting: str
    notebook: str
    figure: str = ""
    holds: bool | None = None


@dataclass(frozen=True)
class Claim:
    """A row of the ledger.

    Args:
        id: As in the table of claims.
        source: Who says it.
        text: The claim, in our words.
        theirs: Its figure, as the source gives it.
        tests: The tests.
        claimed: The ratio that the figure states or implies; 1 for "no change"; None for a direction only.
        up_to: Its upper end, if the figure is a range.
        needs_gpu: No machine without a GPU can judge it; the tests stand beside it.
        note: What a reader must know about the row.
    """

    id: str
    source: str
    text: str
    theirs: str
    tests: tuple[Test, ...] = ()
    claimed: float | None = None
    up_to: float | None = None
    needs_gpu: bool = False
    note: str = ""


LEDGER = (
    Claim("sizes-4000-20min", _SIZES, "Collecting the sizes of some thousand images takes minutes.",
          "4,000 images: 20 minutes; 20,000 on a hard disk: 30 minutes",
          note="Their figures contradict each other: at 254 files/s, 4,000 images take 16 s. Notebook 10 reads more "
               "headers a second than they report for minutes."),
    Claim("sizes-6x", _SIZES, "One scan, a dictionary, a compiled pattern and processes are about 6x as fast.",
          "254 files/s (906 images) became 1,606 files/s (136 images)",
          note="906 images in 3 s are 302/s, not 254, and 136 in 0.08 s are 1,700/s, not 1,606. The two rates come "
               "from two sets of images; on one set the gain grows with the folder, from less than 1 at 100 images to "
               "tens at 1,000, so that no single ratio answers the claim."),
    Claim("workers-clamp", _WORKERS, "Clamping the workers to os.cpu_count() avoids a crash and contention.",
          "min(requested, os.cpu_count())",
          (Test("one worker per core against four", "03", "one per core over four per core"),
           Test("a process that may not use all cores", "03", holds=False)),
          note="On one CPU the line gives 1, not 0 as the write-up says; `cpu_count() - 1` gave 0. It counts the "
               "host's cores; lk.usable_cores() asks affinity and cgroup as well."),
    Claim("persistent-zero", _WORKERS, "Persistent workers without workers raise an error.",
          "persistent_workers=True, num_workers=0", (Test("torch's DataLoader", "03", holds=True),)),
    Claim("marigold-tar", _MARIGOLD, "Training starts later from a tar than from folders.",
          "about 1 h per iteration; minutes and about 100 % GPU use",
          (Test("the first iteration, files in memory", "09",
                "folder over tar scanned, first iteration"),),
          note="Their hour was on a disk that is not here, and grows with the tar: each worker reads all its headers. "
               "Marigold's README says that a tar \"takes a long time to start\"; an index saves the scan."),
    Claim("decode-pil", _DECODING, "PIL with ToTensor is the slowest of three ways to a tensor.",
          "6.8 s for 1,000 images of 224 x 224 (cv2 5.9 s, read_image 3.2 s)",
          (Test("cv2 over PIL", "02", "cv2 over PIL"),
           Test("read_image over PIL, floats from both", "02", "read_image over PIL, floats from both"))),
    Claim("decode-cv2", _DECODING, "cv2 with ToTensor is a little faster than PIL with ToTensor.",
          "5.9 s against 6.8 s for 1,000 images of 224 x 224", (Test("224 x 224", "02", "cv2 over PIL"),), 6.8 / 5.9),
    Claim("decode-read-image", _DECODING, "read_image is twice as fast as PIL with ToTensor.",
          "3.2 s against 6.8 s for 1,000 images of 224 x 224",
          (Test("224 x 224, floats from both", "02", "read_image over PIL, floats from both"),), 6.8 / 3.2,
          note="Their 2x compares unequal work: read_image leaves bytes, ToTensor makes floats."),
    Claim("persistent-epoch2", _DECODING, "With persistent workers the second epoch of a small training is shorter.",
          "ResNet-18, CIFAR-10: 4.6 s became 3.9 s",
          (Test("the whole second epoch", "12", "second epoch, kept workers over new"),), 4.6 / 3.9,
          note="The start and the end of the workers are inside the clock. prefetch_factor=2 is torch's default."),
    Claim("two-steps", _DECODING, "read_image and persistent workers together raise throughput by a third to double.",
          "+30 % to +100 %",
          (Test("whole epochs of 500 x 375", "03", "read_image and persistent workers over PIL and new workers"),),
          1.3, 2.0),
    Claim("timer-cold", _DECODING, "torch.utils.benchmark.Timer leaves cold starts out.", "no figure",
          (Test("a loader whose workers start inside the clock", "00", holds=False),)),
    Claim("v2-tensors", _PIPELINE, "torchvision v2 on tensors removes the overhead of PIL.", "\"zero-copy\"",
          (Test("crop and flip", "04", "tensors over PIL images, crop and flip"),
           Test("crop, flip, color jitter, normalize", "04", "tensors over PIL images")),
          note="No zero-copy in either: nearly every step of v2 makes a new tensor."),
    Claim("batched-transforms", _PIPELINE, "One call of a transform per batch, not per sample, cuts overhead.",
          "no figure", (Test("normalizing", "04", "normalized per batch over per sample"),),
          note="Random transforms of torchvision must not be batched: they draw once a call."),
    Claim("kornia-gpu", _PIPELINE, "With Kornia on the GPU the CPU only decodes, and is no longer the bottleneck.",
          "no figure", (Test("colors that cost nothing, the upper limit", "06", "crops alone over Albumentations"),),
          needs_gpu=True),
    Claim("cuda-prefetch", _PIPELINE, "A prefetcher with a CUDA stream of its own hides the copy behind computing.",
          "no figure", (Test("a simulated device", "07", "prefetched over pinned, simulated"),), needs_gpu=True),
    Claim("wds-shards", _PIPELINE, "Sequential shards remove the seeks, and stream from object storage.", "no figure",
          (Test("over HTTP", "08", "shards over files, over HTTP"),
           Test("a warm disk", "08", "shards over files, warm disk"))),
    Claim("dali-2x", _PIPELINE, "DALI, with decoding helped by the GPU, easily doubles the throughput.",
          "\"easily doubles\"",
          (Test("on the CPU, over torchvision v2", "13", "DALI on the CPU over torchvision v2"),
           Test("on the CPU, over torchvision v1", "13", "DALI on the CPU over torchvision v1 (PIL)")),
          2.0, needs_gpu=True),
    Claim("mixup-free", _PIPELINE, "MixUp and CutMix on the GPU cost nothing.", "\"zero cost\"", claimed=1.0,
          needs_gpu=True, note="Mixing reads and writes pixels once more; notebook 06 shows which functions make the "
               "host wait."),
    Claim("albumentations-cpu", _PIPELINE, "Albumentations is the best for complex color changes on the CPU.",
          "no figure", (Test("heavy recipe, over v2", "05", "Albumentations over v2, heavy recipe"),),
          note="It is no longer maintained; its successor is under the AGPL."),
    Claim("resize-once", _PIPELINE, "Resizing once to short side 256 makes loading cheaper, the same distribution.",
          "\"does not change the distribution\"",
          (Test("loading, 500 x 375", "11", "JPEG at 256 over the photos as they came"),
           Test("detail in crops", "11", holds=False)),
          note="The boxes are distributed as before; small crops lose detail (notebook 11)."),
    Claim("seeded-workers", _PIPELINE, "A generator and a worker_init_fn make parallel loading reproducible.",
          "no figure",
          (Test("a rerun with as many workers", "03b", holds=True),
           Test("a rerun with another number of workers", "03b", holds=False))),
    Claim("tutorial-workers", _TUTORIAL, "Workers make loading faster.", "2.7x",
          (Test("photos, one worker per core", "03", "one worker per core over none"),), 2.7,
          note="Their data are torch.randn and a sleep of 5 ms, which workers overlap without a core."),
    Claim("tutorial-persistent", _TUTORIAL, "Persistent workers make epochs faster.", "1.3x",
          (Test("the whole second epoch", "12", "second epoch, kept workers over new"),), 1.3),
    Claim("tutorial-pinning", _TUTORIAL, "Pinned memory changes little.", "1.0x",
          (Test("a simulated device", "07", "pinned over pageable, simulated"),), 1.0, needs_gpu=True),
    Claim("tutorial-prefetcher", _TUTORIAL, "A prefetcher changes little.", "1.0x",
          (Test("a simulated device", "07", "prefetched over pinned, simulated"),), 1.0, needs_gpu=True),
    Claim("tutorial-getitems", _TUTORIAL, "`__getitems__` makes fetching a batch faster.", "2.9x",
          note="It replaces 32 sleeps by one; photos read from afar gain likewise (08)."),
)  # fmt: skip


def claims() -> pd.DataFrame:
    """The ledger: each claim, its figure, what these notebooks found, and a verdict. Times nothing.

    Returns:
        One row per claim, by `id`: `source`, `claim`, `theirs`, `ours` (each test with its ratio and 95 % interval),
        `verdict`, `notebooks`, `note`, and for plots `claimed`, `ratio`, `low`, `high` of the first test.

    Shown in: notebooks/guide/claims.md
    """
    return judged(known_results())


def judged(known: Mapping[str, Result]) -> pd.DataFrame:
    """The table of `claims`, from results by notebook."""
    rows = []
    for claim in LEDGER:
        found = [(test, *_judge(claim, test, _figure(known, test))) for test in claim.tests]
        ratio = next((ratio for *_, ratio in found if ratio), Ratio(float("nan")))
        rows.append({
            "id": claim.id, "source": claim.source, "claim": claim.text, "theirs": claim.theirs,
            "ours": "; ".join(_told(test, outcome, ratio) for test, outcome, ratio in found),
            "verdict": _combined(claim, [outcome for _, outcome, _ in found]),
            "notebooks": ", ".join(dict.fromkeys(test.notebook for test in claim.tests)), "note": claim.note,
            "claimed": claim.claimed, "ratio": ratio.value, "low": ratio.low, "high": ratio.high,
        })  # fmt: skip
    return pd.DataFrame(rows).set_index("id")


def outcome(low: float, high: float, claimed: float | None = None, up_to: float | None = None) -> str:
    """What an interval of ratios says of a claim: of a ratio, of no change (1), or of a direction (None).

    A claimed ratio agrees with those whose gain is half to twice its own: 3x with 2x to 5x.
    """
    if claimed is None:
        return HOLDS if low > 1 else FAILS if high < 1 else OPEN
    if claimed == 1:
        lowest, highest = 1 / SAME_WITHIN, SAME_WITHIN
        return FAILS if low > highest or high < lowest else HOLDS if low >= lowest and high <= highest else OPEN
    lowest, highest = 1 + (claimed - 1) / GAIN_WITHIN, 1 + ((up_to or claimed) - 1) * GAIN_WITHIN
    if low > highest:
        return LARGER
    if high < lowest:
        return SMALLER if low > 1 else FAILS
    return HOLDS if low >= lowest and high <= highest else OPEN


_PAGE = """# Published claims

Claims about loading images, each beside what the notebooks' stored run found on {machine}.
Only claims that you can look up are listed; `python -m labkit claims` prints these and others, with what tours have
found on your own machine.

Seconds on somebody else's machine cannot be checked here, so we compare ratios: of two of the claim's figures, and of
ours. We say that a measured ratio agrees with a claimed one if its *gain* is half to twice as large, in the whole of
its 95 % interval: "3x" is a gain of 2, so 2x to 5x agree with it. A claim of a direction holds if the interval lies
above 1, and a claim of no change if it lies within 5 % of 1. Where a claim was tested in several settings and holds
in some of them, it *holds under a condition*, which is the setting. What needs a GPU is not judged without one.

| claim | theirs | here | verdict | what to know |
|---|---|---|---|---|
{rows}

Before you act on a published figure, time the two variants in turns on your own data, as
[notebook 00](../00_measure.ipynb) teaches.
"""


def page_of(table: pd.DataFrame, machine: str) -> str:
    """The guide's page of the claims that have an address, in Markdown. Its links lead to the notebooks' files."""
    linked = table[table["source"].str.startswith("[")]
    stems = {path.stem.split("_")[0]: path.stem for path in NOTEBOOK_FOLDER.glob("[0-9]*.ipynb")}
    rows = []
    for row in linked.itertuples():
        ours = re.sub(r"notebook (\w+)", lambda found: f"[{found[1]}](../{stems[found[1]]}.ipynb)", row.ours)
        rows.append(f"| {row.claim} ({row.source}) | {row.theirs} | {ours} | **{row.verdict}** | {row.note} |")
    return _PAGE.format(machine=machine, rows="\n".join(rows))


def lines_of(table: pd.DataFrame, width: int) -> Iterator[str]:
    """Lines of at most `width` characters, 80 to 120: a paragraph per claim, then the number of each verdict."""
    width = min(max(width, 80), 120)
    for name, row in table.iterrows():
        yield f"{name:<20} {row['verdict'].upper()}"
        for text in (row["claim"], f"Theirs: {row['theirs']}.", row["ours"] and f"Here: {row['ours']}.", row["note"]):
            yield from textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")
        yield ""
    counts = table["verdict"].value_counts()
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if verdict in counts)
    yield from textwrap.wrap(f"{len(table)} claims: {summary}.", width)


def _figure(known: Mapping[str, Result], test: Test) -> Ratio | None:
    name = next((name for name in known if name.split("_")[0] == test.notebook), "")
    return known[name].figures.get(test.figure) if name and test.figure else None


def _judge(claim: Claim, test: Test, ratio: Ratio | None) -> tuple[str, Ratio | None]:
    if test.holds is not None:
        return (HOLDS if test.holds else FAILS), None
    if ratio is None:
        return MISSING, None
    if pd.isna(ratio.low):
        return OPEN, ratio
    return outcome(ratio.low, ratio.high, claim.claimed, claim.up_to), ratio


def _told(test: Test, said: str, ratio: Ratio | None) -> str:
    measured = f": {ratio}" if ratio else ""
    if ratio and pd.isna(ratio.low):  # simulated, or calculated: there is no interval to judge by
        return f"{test.setting}{measured} (notebook {test.notebook})"
    return f"{test.setting}{measured} ({said}, notebook {test.notebook})"


def _combined(claim: Claim, outcomes: list[str]) -> str:
    """One verdict for all tests: a claim holds if each does, and under a condition if only some do."""
    if claim.needs_gpu:
        return NEEDS_GPU
    if not outcomes:
        return UNTESTED
    if len(set(outcomes)) == 1:
        return outcomes[0]
    if HOLDS in outcomes:
        return CONDITION
    return next(said for said in (FAILS, LARGER, SMALLER, OPEN, MISSING) if said in outcomes)
