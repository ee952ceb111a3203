"""`labkit watch` of the ranks of one machine, started as each launcher starts them: one report, with a row for each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import REPO

SCRIPT = """
import os, subprocess, sys, time, torch
from torch.utils.data import DataLoader

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.zeros(8)

def start_the_others(n_ranks):  # as Lightning's launcher does
    os.environ.update(MASTER_ADDR="127.0.0.1", NODE_RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(n_ranks))
    name = os.path.abspath(sys.argv[0])
    command = [sys.executable, *(["-m", __spec__.name] if __spec__ else [name]), *sys.argv[1:]]
    return [subprocess.Popen(command, env={**os.environ, "LOCAL_RANK": str(n)}) for n in range(1, n_ranks)]

if __name__ == "__main__":
    others = []
    if "launch" in sys.argv and "LOCAL_RANK" not in os.environ:
        others = start_the_others(3)
    model = torch.nn.Linear(8, 1)
    steps = torch.optim.SGD(model.parameters(), 1e-6)
    for batch in DataLoader(Numbers(), 2):
        model(batch).mean().backward()
        steps.step()
    print("rank", os.environ.get("LOCAL_RANK"), "of", sys.argv[1:], flush=True)
    if others:
        del os.environ["WORLD_SIZE"]  # as its end does
    assert not any(other.wait() for other in others)
"""
WATCH = [sys.executable, "-m", "labkit", "watch", "--json", "found.json"]


@pytest.fixture
def environment():
    names = ("SLURM_", "OMPI_", "LOCAL_", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_")
    own = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    return {**own, "PYTHONPATH": str(REPO)}


def started_by_one(commands: list[list[str]], environments: list[dict[str, str]], folder: Path) -> list[str]:
    """What the processes say that one process starts beside one another, as a launcher does."""
    (folder / "train.py").write_text(SCRIPT)
    launcher = """
import json, subprocess, sys
commands, environments = json.load(sys.stdin)
both = zip(commands, environments)
ranks = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for command, env in both]
print(json.dumps([rank.communicate()[1] for rank in ranks]))
assert not any(rank.returncode for rank in ranks)
"""
    command, given = [sys.executable, "-c", launcher], json.dumps([commands, environments])
    done = subprocess.run(command, input=given, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def slurm_task(rank: int) -> dict[str, str]:
    number = str(rank)
    return {
        "SLURM_PROCID": number, "SLURM_LOCALID": number, "SLURM_NODEID": "0", "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_CPUS_ON_NODE": "2",
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0",
    }  # fmt: skip


def mpi_process(rank: int) -> dict[str, str]:
    own = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    pmix = {"PMIX_NAMESPACE": str(os.getpid()), "PMIX_RANK": str(rank)}
    return pmix | {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in own.items()}


def own_lines(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def lines_in_a_step(rank: int) -> dict[str, str]:
    return slurm_task(rank) | own_lines(rank)


SHELL = ["bash", "-c", '"$@"; exit $?', "bash"]  # which lies between srun and the script


@pytest.mark.parametrize(
    ("before", "of_rank"),
    [
        pytest.param(SHELL, slurm_task, id="srun, a shell between"),
        pytest.param(SHELL, lines_in_a_step, marks=pytest.mark.exhaustive, id="own lines in a step"),
        pytest.param(SHELL, mpi_process, marks=pytest.mark.exhaustive, id="mpirun, a shell between"),
    ],
)
def test_ranks_report_once_and_no_file_is_overwritten(tmp_path, environment, before, of_rank):
    environments = [environment | of_rank(rank) for rank in (0, 1)]
    said = started_by_one([[*before, *WATCH, "train.py"]] * 2, environments, tmp_path)
    assert ["labkit watch: wrote " in each for each in said] == [True, False]
    assert said[0].count("ranks  ") == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert sorted(row["rank"] for row in found["ranks"]) == [0, 1]
    assert {row["n_batches"] for row in found["ranks"]} == {16}  # of 20, without the first ones


@pytest.mark.exhaustive
def test_each_machine_writes_files_of_its_own(tmp_path, environment):
    """Of two tasks on two machines that share the folder, one on each."""
    here = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
    one_each = [slurm_task(rank) | here | {"SLURM_NODEID": str(rank)} for rank in (0, 1)]
    said = started_by_one([[*WATCH, "train.py"]] * 2, [environment | each for each in one_each], tmp_path)
    assert ["wrote " in each for each in said] == [True, True]
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["found-rank1.json", "found.json"]


@pytest.mark.parametrize(
    "program", [["train.py"], pytest.param(["-m", "train"], marks=pytest.mark.exhaustive)], ids=["script", "module"]
)
def test_ranks_that_the_first_one_starts_are_watched_too(tmp_path, environment, program):
    """Lightning's launcher starts plain `python train.py`, with arguments."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [*WATCH, *program, "launch", "--epochs", "3"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {n} of ['launch', '--epochs', '3']" for n in range(3)]
    assert done.stderr.count("labkit watch: wrote ") == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert sorted(row["rank"] for row in found["ranks"]) == [0, 1, 2]
    assert not list(tmp_path.glob("labkit-watch-*"))


@pytest.mark.exhaustive
def test_other_processes_that_a_script_starts_run_as_they_are(tmp_path, environment):
    (tmp_path / "other.py").write_text("import sys; print('labkit' in sys.modules)")
    starts = "subprocess.run([sys.executable, 'other.py'], env={**os.environ, 'LOCAL_RANK': '1'})"
    (tmp_path / "train.py").write_text(f"{SCRIPT}    {starts}\n")
    done = subprocess.run([*WATCH, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "False\n" in done.stdout
    assert not json.loads((tmp_path / "found.json").read_text()).get("ranks")
