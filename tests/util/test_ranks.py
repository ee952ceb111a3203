"""Ranks, from the variables that each launcher sets: those of real launches, and what is made of senseless ones."""

import os
import warnings

import pytest
import torch
from torch import distributed

from labkit.app.doctor import findings
from labkit.util import ranks
from labkit.util.ranks import Ranks, cores_per_rank, find_ranks, rank_and_world_size, senseless_variables

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
}  # fmt: skip
# Of `srun -n 20`: eight tasks on each of two machines, and four on the third.
STEP = {
    "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "24", "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "20", "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
    "SLURM_TASKS_PER_NODE": "8(x3)", "SLURM_CPUS_ON_NODE": "96", "ENVIRONMENT": "BATCH",
}  # fmt: skip
BATCH_SCRIPT = {
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7",
    "SLURM_TASKS_PER_NODE": "8", "ENVIRONMENT": "BATCH",
}  # fmt: skip
DOCUMENTED = {"SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
LIGHTNING = {"LOCAL_RANK": "2", "WORLD_SIZE": "4", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
ALONE = ("", 0, 1, 0, 1)


def found(environment: dict[str, str]) -> tuple[str, int, int, int | None, int | None]:
    each = find_ranks(environment)
    return each.launcher, each.rank, each.world_size, each.local_rank, each.n_local


class TestLaunchers:
    @pytest.mark.parametrize(
        ("environment", "expected"),
        [
            (TORCHRUN, ("torchrun", 5, 8, 1, 4)),
            (STEP, ("Slurm", 9, 20, 1, 8)),
            ({**STEP, "SLURM_PROCID": "17", "SLURM_NODEID": "2"}, ("Slurm", 17, 20, 1, 4)),
            (DOCUMENTED, ("Slurm", 3, 8, 3, 4)),
            (OPEN_MPI, ("Open MPI", 3, 4, 1, 2)),
            (MPICH, ("MPICH", 3, 4, 1, 2)),
            (LIGHTNING, ("Lightning's launcher", 2, 4, 2, 4)),
            ({}, ALONE),
        ],
        ids=["torchrun", "srun", "srun, last machine", "srun, few", "mpirun", "mpich", "Lightning", "none"],
    )
    def test_tell_ranks_here_and_in_all(self, environment, expected):
        assert found(environment) == expected

    def test_a_batch_script_is_no_task(self):
        """Slurm gives it the numbers of one; only what it starts by `srun` are tasks."""
        assert found(BATCH_SCRIPT) == ALONE
        assert found({**BATCH_SCRIPT, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"})[:3] == ("Slurm", 0, 8)

    @pytest.mark.parametrize(
        ("outer", "inner", "launcher"),
        [(STEP, TORCHRUN, "torchrun"), (STEP, OPEN_MPI, "Open MPI"), ({**STEP, **MPICH}, {}, "Slurm"),
         (BATCH_SCRIPT, LIGHTNING, "Lightning's launcher"), (OPEN_MPI, TORCHRUN, "torchrun")],
    )  # fmt: skip
    def test_the_nearer_one_counts(self, outer, inner, launcher):
        assert find_ranks(outer | inner).launcher == launcher

    def test_lines_of_ones_own_in_a_step_take_the_rest_from_slurm(self):
        """`RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS python train.py`"""
        own = {**STEP, "RANK": "9", "WORLD_SIZE": "20", "MASTER_ADDR": "node0"}
        assert found(own) == ("RANK and WORLD_SIZE", 9, 20, 1, 8)
        assert found({**own, "RANK": "3", "WORLD_SIZE": "4"})[3:] == (None, None), "of something else"

    @pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1", "127.0.1.1"])
    def test_all_are_here_who_meet_here(self, address):
        assert found({"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": address})[3:] == (2, 4)
        assert found({"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"})[3:] == (None, None)

    @pytest.mark.parametrize(
        "environment",
        [
            {"RANK": "8", "WORLD_SIZE": "8"}, {"RANK": "one", "WORLD_SIZE": "8"}, {"RANK": "1"}, {"LOCAL_RANK": "0"},
            {**TORCHRUN, "LOCAL_RANK": "4"}, {**TORCHRUN, "RANK": "0"}, {**STEP, "SLURM_PROCID": "20"},
            {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": ""}, {**LIGHTNING, "NODE_RANK": "1"},
        ],
    )  # fmt: skip
    def test_senseless_variables_count_as_none(self, environment):
        assert found(environment) == ALONE

    def test_are_named_where_ranks_cannot_be(self):
        said = ["RANK='8' and WORLD_SIZE=8, and ranks go from 0 to 7"]
        assert senseless_variables({"RANK": "8", "WORLD_SIZE": "8"}) == said
        assert senseless_variables(TORCHRUN) == senseless_variables({}) == []


@pytest.fixture
def started_as(monkeypatch):
    def start(environment):
        for name in [*os.environ]:
            if name in {"RANK", "WORLD_SIZE"} or name.startswith(("SLURM_", "OMPI_", "LOCAL_", "PMI_")):
                monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    ranks._warn_of_scheduler.cache_clear()
    return start


class TestSamples:
    @pytest.mark.parametrize("environment", [STEP, OPEN_MPI, MPICH], ids=["srun", "mpirun", "mpich"])
    def test_are_shared_with_a_warning_once_where_processes_may_be_trainings_of_their_own(
        self, started_as, environment
    ):
        started_as(environment)
        rank, world_size = find_ranks(environment).rank, find_ranks(environment).world_size
        with pytest.warns(UserWarning, match=f"started {world_size} processes.*loads its share.*as rank {rank} of one"):
            assert rank_and_world_size() == (rank, world_size)
        with warnings.catch_warnings(action="error"):
            assert rank_and_world_size() == (rank, world_size)

    def test_a_worker_does_not_warn(self, started_as, monkeypatch):
        started_as(STEP)
        monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: object())
        with warnings.catch_warnings(action="error"):
            assert rank_and_world_size() == (9, 20)

    def test_are_shared_without_a_word_under_torchrun(self, started_as):
        started_as(TORCHRUN)
        with warnings.catch_warnings(action="error"):
            assert rank_and_world_size() == (5, 8)

    def test_torch_distributed_is_right_where_the_environment_differs(self, started_as, monkeypatch, tmp_path):
        started_as(STEP)
        monkeypatch.setattr(distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(distributed, "get_rank", lambda: 3)
        monkeypatch.setattr(distributed, "get_world_size", lambda: 6)
        with warnings.catch_warnings(action="error"):
            assert rank_and_world_size() == (3, 6)
            started_as({**STEP, "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "6"})
            assert rank_and_world_size() == (3, 6)  # as Slurm says, too
        started_as(STEP)
        assert find_ranks().n_local is None
        started_as({**LIGHTNING, "MASTER_ADDR": "node0", "NODE_RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "6"})
        assert find_ranks() == Ranks("torch.distributed", 3, 6, 0, 3), "each machine has as many"
        started_as({"MASTER_ADDR": "localhost"})
        assert find_ranks() == Ranks("torch.distributed", 3, 6, 3, 6)


class TestCores:
    """96 cores of the machine, of which the process may use some."""

    @pytest.fixture
    def machine(self, monkeypatch):
        def set_cores(own, of_launcher):
            monkeypatch.setattr(ranks, "usable_cores", lambda: own)
            monkeypatch.setattr(ranks, "core_limits", lambda: {"cpu_count": 96, "affinity": own})
            monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(of_launcher)))

        return set_cores

    @pytest.mark.parametrize(
        ("environment", "own", "of_launcher", "expected"),
        [
            ({}, 96, 96, 96),
            (TORCHRUN, 96, 96, 24), (TORCHRUN, 16, 96, 16),  # each bound to its own
            (STEP, 96, 1, 12), (STEP, 12, 1, 12), ({**STEP, "SLURM_CPUS_ON_NODE": "48"}, 48, 1, 6),
            ({**STEP, "SLURM_CPUS_ON_NODE": "48"}, 6, 1, 6),  # --cpus-per-task=6
            (OPEN_MPI, 1, 96, 1), (OPEN_MPI, 96, 96, 48), (OPEN_MPI, 48, 96, 48),  # bound to a socket
            ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 48, 96, 24),
            (LIGHTNING, 96, 96, 24),
            (BATCH_SCRIPT, 96, 96, 96),
            ({"LOCAL_WORLD_SIZE": "4"}, 96, 96, 24),
            (TORCHRUN, 2, 2, 1),
        ],
    )  # fmt: skip
    def test_of_a_rank_are_its_share_of_what_the_launcher_has(
        self, started_as, machine, environment, own, of_launcher, expected
    ):
        started_as(environment)
        machine(own, of_launcher)
        assert cores_per_rank() == expected

    def test_of_a_quota_are_shared_too(self, started_as, machine, monkeypatch):
        started_as(TORCHRUN)
        machine(8, 96)
        monkeypatch.setattr(ranks, "core_limits", lambda: {"cpu_count": 96, "affinity": 96, "cgroup_quota": 8})
        assert cores_per_rank() == 2

    def test_where_nothing_is_known_each_gpu_has_a_rank(self, started_as, machine, monkeypatch):
        started_as({"RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "node0"})
        machine(96, 96)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        assert cores_per_rank() == 12


def test_doctor_names_the_rank_and_the_variables(started_as):
    for environment, said in (
        (STEP, "rank 9 of 20, local rank 1 of 8, by Slurm (SLURM_PROCID=9, SLURM_STEP_NUM_TASKS=20"),
        ({}, "none: this process is alone"),
        ({"RANK": "9", "WORLD_SIZE": "8"}, "ignored: RANK='9' and WORLD_SIZE=8, and ranks go from 0 to 7"),
    ):
        started_as(environment)
        assert said in dict(findings())["ranks"]
