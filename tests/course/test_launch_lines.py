"""Notebook 14's job script and data loading, as pasted: each rank knows its number, and all photos are read once."""

import json
import math
import os
import re
import subprocess
import sys
import tarfile
from io import BytesIO

import nbformat
import pytest
from PIL import Image

from tests.image_files import encoded
from tests.paths import REPO

FIRST = nbformat.read(REPO / "notebooks" / "14_at_scale.ipynb", as_version=4).cells[0].source
N_PHOTOS, N_SHARDS = 16, 4

# What Slurm gives: a step runs its command in each task, with the task's numbers.
SRUN = """
import os, subprocess, sys
command = [word for word in sys.argv[1:] if not word.startswith("--")]
n_tasks = next((int(word[9:]) for word in sys.argv if word.startswith("--ntasks=")), int(os.environ["SLURM_NTASKS"]))
tasks = [subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)})
         for n in range(n_tasks)]
sys.exit(max(task.wait() for task in tasks))
"""
BEFORE = """
import json
import torch.distributed as dist
os_cores = sorted(os.sched_getaffinity(0))[:2]
os.sched_setaffinity(0, os_cores)
chosen = []
torch.cuda.set_device = chosen.append
def transform(image):
    return image[:, :8, :8]
"""
AFTER = """
if __name__ == "__main__":
    dist.init_process_group("gloo")
    labels = [int(label) for images, several in loader for label in several]
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, labels)
    found = {"rank": dist.get_rank(), "gpus": chosen, "labels": everywhere,
             "workers": loader.pipeline[0].num_workers, "cpus": os.environ.get("SRUN_CPUS_PER_TASK")}
    dist.destroy_process_group()
    open(f"found{found['rank']}.json", "w").write(json.dumps(found))
"""


def block(language):
    [text] = re.findall(rf"^```{language}\n(.*?)^```$", FIRST, re.DOTALL | re.MULTILINE)
    return text


def write_program(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def place(tmp_path):
    """`train.py`, `job.sh`, shards in a bucket, and the commands of a cluster."""
    (tmp_path / "bin").mkdir()
    write_program(tmp_path / "bin" / "srun", f"#!{sys.executable}\n{SRUN}")
    write_program(tmp_path / "bin" / "scontrol", "#!/bin/sh\nprintf '127.0.0.1\\nother\\n'\n")
    write_program(tmp_path / "bin" / "aws", '#!/bin/sh\ncp -r "${3#s3://}" "$4"\n')
    write_program(tmp_path / "bin" / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bucket" / "shards").mkdir(parents=True)
    for shard in range(N_SHARDS):
        with tarfile.open(tmp_path / "bucket" / "shards" / f"shard-{shard:06d}.tar", "w") as tar:
            for number in range(shard, N_PHOTOS, N_SHARDS):
                for name, data in (("jpg", encoded(Image.new("RGB", (9, 9)))), ("cls", str(number).encode())):
                    member = tarfile.TarInfo(f"{number:03d}.{name}")
                    member.size = len(data)
                    tar.addfile(member, BytesIO(data))
    pasted = block("python").replace("/local_nvme", str(tmp_path / "local"))
    for others, own in {"000979": f"{N_SHARDS - 1:06d}", "1_281_167": str(N_PHOTOS), "256": "2"}.items():
        assert others in pasted
        pasted = pasted.replace(others, own)
    imports, *rest = pasted.splitlines(keepends=True)
    (tmp_path / "train.py").write_text("".join([imports, BEFORE, *rest, AFTER]))
    (tmp_path / "job.sh").write_text(block("bash").replace("/local_nvme", str(tmp_path / "local")))
    (tmp_path / "local").mkdir()
    return tmp_path


def test_the_job_asks_for_the_cores_that_the_text_counts():
    [asked] = [dict(re.findall(r"--([\w-]+)=(\d+)", line)) for line in FIRST.splitlines() if "#SBATCH" in line]
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    [(rate, image_ms)] = re.findall(r"At ([\d,]+) images/s and (\d) ms", FIRST)
    cores = math.ceil(int(rate.replace(",", "")) * int(image_ms) / 1e3 + 1)
    assert int(asked["cpus-per-task"]) == cores
    assert f"or {8 * cores} for eight GPUs" in FIRST


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Slurm and torchrun's shares of cores are Linux's")
@pytest.mark.parametrize("launcher", ["slurm", "torchrun"])
def test_two_ranks_meet_and_read_each_photo_once(place, launcher):
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    environment = {**outside, "PATH": f"{place / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(place)}
    if launcher == "slurm":
        environment |= {
            "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "2",
            "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "2",
        }  # fmt: skip
        command = ["bash", "-e", "job.sh"]
    else:
        (place / "local").rmdir()
        (place / "bucket").rename(place / "local")
        [line] = re.findall(r"`torchrun (.*?)`", FIRST)
        command = [sys.executable, "-m", "torch.distributed.run", *line.replace("=8", "=2").split()]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = [json.loads((place / f"found{rank}.json").read_text()) for rank in range(2)]
    assert [one["gpus"] for one in found] == [[0], [1]]
    assert [one["cpus"] for one in found] == (["2", "2"] if launcher == "slurm" else [None, None])
    # Slurm's tasks have cores of their own, torchrun's ranks share those of the machine; a worker on each.
    assert [one["workers"] for one in found] == ([2, 2] if launcher == "slurm" else [1, 1])
    first, second = found[0]["labels"]
    assert sorted(first + second) == list(range(N_PHOTOS))
    assert len(first) == len(second) == N_PHOTOS // 2
