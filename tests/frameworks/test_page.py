"""The scripts of the page on frameworks: the same weights in each run, and after a crash in mid-epoch."""

import os
import subprocess
import sys

import pytest

from tests.pages import FRAMEWORKS, blocks
from tests.paths import REPO

pytestmark = pytest.mark.frameworks

NAMES = ("torchrun", "lightning", "accelerate", "transformers")
SCRIPTS = dict(zip(NAMES, blocks(FRAMEWORKS, "python"), strict=True))
N_STEPS = 6  # of an epoch, of which every third leaves a checkpoint

# Notes a digest of the weights after each step, and ends the process as a crash does after some of them.
RUNNER = """
import hashlib, json, os, runpy, sys
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

notes, n_steps, count = sys.argv.pop(1), int(sys.argv.pop(1)), 0

def note(optimizer, *_):
    global count
    count += 1
    weights = [each.detach().numpy().tobytes() for group in optimizer.param_groups for each in group["params"]]
    with open(f"{notes}-{os.environ.get('RANK', 0)}", "a") as file:
        print(hashlib.sha256(b"".join(weights)).hexdigest(), file=file)
    if count == n_steps:
        os._exit(1)

register_optimizer_step_post_hook(note)
sys.argv = ["train.py"]
runpy.run_path("train.py", run_name="__main__")
"""


def run(folder, name, notes, *, n_steps=0, n_ranks=1):
    """The weights after each step of a rank, by their digests."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPTS[name].text)
    (folder / "runner.py").write_text(RUNNER)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    command = [
        sys.executable,
        *(launcher if name == "torchrun" or n_ranks > 1 else []),
        "runner.py",
        notes,
        str(n_steps),
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    environment |= {"TMPDIR": str(folder), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) == (n_steps == 0), done.stdout + done.stderr
    return [(folder / f"{notes}-{rank}").read_text().split() for rank in range(n_ranks)]


@pytest.mark.parametrize(
    ("name", "n_ranks"), [*((name, 1) for name in SCRIPTS), ("torchrun", 2), ("accelerate", 2), ("transformers", 2)]
)
def test_a_script_repeats_and_goes_on_after_a_crash_bit_for_bit(tmp_path, first_photos, name, n_ranks):
    if name != "torchrun":
        pytest.importorskip(name)
    for folder in ("whole", "again"):
        for copy in range(2 * n_ranks):
            for photo in first_photos(22).rglob("*.jpg"):
                path = tmp_path / folder / "photos" / photo.parent.name / f"{copy}_{photo.name}"
                path.parent.mkdir(parents=True, exist_ok=True)
                os.link(photo, path)
    whole = run(tmp_path / "whole", name, "whole", n_ranks=n_ranks)
    assert len(whole[0]) == len(set(whole[0])) == 3 * N_STEPS
    assert whole == [whole[0]] * n_ranks  # gradients were reduced
    n_begun = N_STEPS + 5  # two steps after a checkpoint in the second epoch
    begun = run(tmp_path / "again", name, "begun", n_steps=n_begun, n_ranks=n_ranks)
    assert begun[0] == whole[0][:n_begun]
    rest = run(tmp_path / "again", name, "rest", n_ranks=n_ranks)
    assert rest == [whole[0][N_STEPS + 3 :]] * n_ranks
