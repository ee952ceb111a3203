"""Whether `labkit watch` names what time goes into: by scripts with a planted cause, which time it themselves.

What is planted takes many times the 5 ms between two samples of the stack, so that chance decides little of a share.
"""

import json
from textwrap import indent
from typing import NamedTuple

import pytest

from tests.watching.trained import ENVIRONMENT, watch_script

TEMPLATE = '''
import json, os, sys, time
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

FOLDER, WORKERS = sys.argv[1], int(sys.argv[2])
KNOWN = {"making": 0.0, "step": 0.0}
PHOTO = Image.effect_noise((2400, 2000), 60).convert("RGB")

def repeats(call, seconds=0.048):
    """How often a call fits, on a machine of any speed."""
    took_s = []
    for _ in range(3):
        began_s = time.perf_counter()
        call()
        took_s.append(time.perf_counter() - began_s)
    return max(1, round(seconds / min(took_s)))

class timed:
    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.began_s = time.perf_counter()

    def __exit__(self, *_):
        KNOWN[self.name] = KNOWN.get(self.name, 0.0) + time.perf_counter() - self.began_s

class Mark(timed):
    began_s = None

    def __call__(self, image, **_):
        if self.began_s is None:
            self.__enter__()
        else:
            self.__exit__()
            self.began_s = None
        return image

@setup
def save():
    with open(os.path.join(FOLDER, str(os.getpid())), "w") as file:
        json.dump(KNOWN, file)

class Data(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        with timed("making"):
            time.sleep(0.012)
            for _ in range(200_000): index * index
@getitem
        return torch.full((4,), float(index))

def collate(samples):
    with timed("making"):
        batch = torch.stack(samples)
@collate
    with timed("making"):
        save()
    return batch

model = torch.nn.Linear(4, 1)
steps = torch.optim.SGD(model.parameters(), 1e-9)
if __name__ == "__main__":
    batches = iter(DataLoader(Data(), 2, num_workers=WORKERS, collate_fn=collate))
    for _ in range(len(Data()) // 2):
        batch = next(batches)
        with timed("step"):
            model(batch).mean().backward()
            steps.step()
            time.sleep(0.012)
@step
    save()
    next(batches, None)
'''


class Plant(NamedTuple):
    """A statement: what it needs, the transform that the report should name, how near, and as what it is timed."""

    code: str
    setup: str = ""
    what: str | None = None
    margin: float = 0.05
    timed: str = ""  # an expression; default: its name


def compose(name, kind, transform, call="PHOTO", mark="Mark({name!r})"):
    """One that its own marks time, without those."""
    setup = f"MARK = {mark.format(name=name)}\n{name} = {kind}([MARK, {transform}, MARK])"
    return Plant(f"{name}({call})", setup, transform.partition("(")[0].rpartition(".")[2], timed="'marked'")


LOOPS = "LOOPS = 100_000 * repeats(lambda: [3 * 3 for _ in range(100_000)])"
PLANTS = {
    "a Python loop": Plant("for _ in range(LOOPS): 3 * 3", LOOPS),
    "PIL convert": Plant(
        'for _ in range(CONVERSIONS): PHOTO.convert("HSV")', 'CONVERSIONS = repeats(lambda: PHOTO.convert("HSV"))'
    ),
    "sleep": Plant("time.sleep(0.048)"),
    "JSON": Plant("for _ in range(TEXTS): json.loads(TEXT)", """
TEXT = json.dumps([[number] * 9 for number in range(16_000)])
TEXTS = repeats(lambda: json.loads(TEXT))
""", margin=0.10),
    "a NumPy copy": Plant("for _ in range(COPIES): ARRAY.copy()", """
ARRAY = np.zeros(12_000_000)
COPIES = repeats(ARRAY.copy)
""", margin=0.10),  # freed with the lock
    "a C call with Python's lock": Plant("C.usleep(48_000)", "import ctypes; C = ctypes.PyDLL(None)", margin=0.10),
    "V1": compose("V1", "transforms.Compose", "transforms.RandomRotation((9, 9))"),
    "V2": compose("V2", "v2.Compose", "v2.ColorJitter(contrast=(0.5, 0.5))"),
    "A": compose("A", "albumentations.Compose", "albumentations.MedianBlur((5, 5), p=1)",
                 "image=np.asarray(PHOTO)", "albumentations.Lambda(image=Mark({name!r}), p=1)"),
    "collating": Plant("for _ in range(2 * LOOPS): 3 * 3", LOOPS),
    "stepping": Plant("for _ in range(LOOPS): 3 * 3", LOOPS),
}  # fmt: skip
LIBRARIES = "import albumentations\nfrom torchvision import transforms\nfrom torchvision.transforms import v2\n"


def script_of(getitem=(), collate=(), step=()):
    """The template with plants in its places; their lines end with their names."""
    names = (*getitem, *collate, *step)
    setup = "\n".join(PLANTS[name].setup for name in names)
    found = TEMPLATE.replace("@setup", (LIBRARIES if "V1" in names else "") + setup)
    for place, of_place in (("@getitem", getitem), ("@collate", collate), ("@step", step)):
        blocks = [
            f"with timed({PLANTS[name].timed or repr(name)}):\n    {PLANTS[name].code}  # {name}" for name in of_place
        ]
        found = found.replace(place, indent("\n".join(blocks), " " * (8 if place == "@collate" else 12)))
    return found


def watched(folder, script, num_workers):
    """The report of a script, and what it noted itself."""
    path, report, notes = folder / "train.py", folder / "report.json", folder / "notes"
    path.write_text(script)
    notes.mkdir()
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    watch_script("--json", report, path, notes, num_workers, check=True, env=environment, timeout=None)
    return json.loads(report.read_text()), [json.loads(p.read_text()) for p in notes.iterdir() if p.is_file()]


@pytest.mark.exhaustive
@pytest.mark.alone
class TestWhatIsPlanted:
    @pytest.mark.parametrize(
        ("places", "num_workers"),
        [
            ({"getitem": ("a Python loop", "PIL convert", "sleep")}, 0),
            ({"getitem": ("JSON", "a NumPy copy", "a C call with Python's lock")}, 2),
            ({"getitem": ("V1", "V2", "A")}, 2),
            ({"collate": ("collating",), "step": ("stepping",)}, 2),
        ],
    )  # fmt: skip
    def test_as_lines_is_told_with_their_shares(self, tmp_path, places, num_workers):
        script = script_of(**places)
        report, notes = watched(tmp_path, script, num_workers)
        for name in (name for names in places.values() for name in names):
            part = "step" if name == "stepping" else "making"
            true = sum(note.get(name, 0.0) for note in notes) / sum(note[part] for note in notes)
            [number] = [n for n, line in enumerate(script.splitlines(), 1) if line.endswith(f"# {name}")]
            rows = [row for row in report["lines"] if part in row["part"] and row["number"] == number]
            rows = [row for row in rows if PLANTS[name].what in (None, row["what"])]
            assert {row["path"] for row in rows} == {str(tmp_path / "train.py")}, name
            assert true > PLANTS[name].margin, name
            assert abs(sum(row["share"] for row in rows) - true) <= PLANTS[name].margin, name


UNKNOWN = """
import json, random, sys, time
import torch

torch.set_num_threads(1)
KNOWN = {"numbers": 0.0, "masks": 0.0, "waiting": 0.0}

def batches(count):
    for _ in range(count):
        rows = []
        for _ in range(32):
            began_s = time.perf_counter()
            words = [random.randrange(5000) for _ in range(256)]  # numbers
            between_s = time.perf_counter()
            rows.append(torch.tensor([word if random.random() > 0.15 else 0 for word in words]))  # masks
            KNOWN["numbers"] += between_s - began_s
            KNOWN["masks"] += time.perf_counter() - between_s
        yield torch.stack(rows)

model = torch.nn.Sequential(torch.nn.Embedding(5000, 32), torch.nn.Flatten(), torch.nn.Linear(32 * 256, 10))
steps = torch.optim.Adam(model.parameters())
began_s = asked_s = time.perf_counter()
for batch in batches(800):
    KNOWN["waiting"] += time.perf_counter() - asked_s
    model(batch).square().mean().backward()
    steps.step()
    asked_s = time.perf_counter()
print(json.dumps({name: seconds / (asked_s - began_s) for name, seconds in KNOWN.items()}))
"""


@pytest.mark.exhaustive
@pytest.mark.alone
def test_a_loop_that_gives_pythons_lock_away_for_moments_is_seen_where_its_time_goes(tmp_path):
    """As `torch.tensor` does, again and again: a thread that waits for the lock until it is free gets it too seldom."""
    (tmp_path / "train.py").write_text(UNKNOWN)
    done = watch_script("--json", "report.json", "train.py", cwd=tmp_path)
    report, true = json.loads((tmp_path / "report.json").read_text()), json.loads(done.stdout)
    assert true["waiting"] > 0.3
    margin = 0.15 if report["others_share"] < 0.1 else 0.3  # a busy core lets the thread run when it is told to
    assert abs(1 - report["shares"]["compute"] - true["waiting"]) < margin
    for name in ("numbers", "masks"):
        [number] = [n for n, line in enumerate(UNKNOWN.splitlines(), 1) if line.endswith(f"# {name}")]
        rows = [row for row in report["lines"] if row["part"] == "making a batch" and row["number"] == number]
        assert abs(sum(row["share"] for row in rows) - true[name] / true["waiting"]) < margin + 0.1, name
