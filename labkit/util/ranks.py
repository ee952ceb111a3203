"""This process among those of a distributed training: its rank, how many there are, and how many on this machine.

`find_ranks` is the one place that knows the launchers. The rule, from first to last:

1. `torch.distributed`, once it is initialized, tells rank and world size.
2. Else the environment does, by the first launcher in `_LAUNCHERS` whose variables are complete and sensible. One that
   another launcher starts is nearer to the process, as torchrun in a step of Slurm, and comes first. Variables that
   are missing, empty or senseless, such as a rank that is no number below the world size, count as none.
3. Else the process is alone.

The launcher also tells how many ranks share this machine. Where it does not, these are as many as Slurm counts here for
the same rank, or all of them if they meet at an address of this machine alone (`MASTER_ADDR`).
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from labkit.util.machine import core_limits, usable_cores
from labkit.util.process import warn_caller

LIGHTNING, SLURM, OPEN_MPI, OWN_LINES = "Lightning's launcher", "Slurm", "Open MPI", "RANK and WORLD_SIZE"
_SCHEDULERS = (SLURM, OPEN_MPI, "MPICH")  # they also start processes that have nothing to do with one another


@dataclass(frozen=True)
class Ranks:
    """What `find_ranks` found.

    Attributes:
        launcher: Who says so; empty if the process is alone.
        rank, world_size: Among all processes of the training.
        local_rank, n_local: Among those on this machine; None: unknown.
        variables: Names of the environment's variables that say so.
    """

    launcher: str = ""
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = 0
    n_local: int | None = 1
    variables: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.launcher:
            return "this process is alone"
        here = f"local rank {self.local_rank} of {self.n_local}" if self.n_local else "how many here is unknown"
        return f"rank {self.rank} of {self.world_size}, {here}, by {self.launcher}"

    def told(self, environment: Mapping[str, str] = os.environ) -> str:
        """The variables, with their values."""
        return ", ".join(f"{name}={environment[name]}" for name in self.variables if name in environment)


def find_ranks(environment: Mapping[str, str] | None = None) -> Ranks:
    """Rank, world size, and the same on this machine, from whatever launcher started this process.

    Args:
        environment: Default: this process's, and `torch.distributed` where it is initialized.
    """
    variables = os.environ if environment is None else environment
    found = next((ranks for find in _LAUNCHERS if _is_sensible(ranks := find(variables))), None) or Ranks()
    if environment is not None or not _is_initialized():
        return found
    from torch import distributed

    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    if (found.rank, found.world_size) == (rank, world_size):
        return replace(found, launcher=found.launcher or "torch.distributed")
    return Ranks("torch.distributed", rank, world_size, *_on_this_machine(rank, world_size, variables))


def rank_and_world_size() -> tuple[int, int]:
    """Rank and world size of the training, by which loaders share out the samples. Warns where that may surprise."""
    found = find_ranks()
    if not found.launcher:
        for said in senseless_variables():
            told = (
                f"the environment has {said}: so this process loads all samples. Set both as torchrun does, or neither"
            )
            warn_caller(told, UserWarning)
    elif found.launcher in _SCHEDULERS and not _is_initialized() and not _is_worker():
        _warn_of_scheduler(found, found.told())
    return found.rank, found.world_size


@cache  # once in a process
def _warn_of_scheduler(found: Ranks, told: str) -> None:
    warn_caller(
        f"{found.launcher} started {found.world_size} processes ({told}), so this one loads its share of the samples, "
        f"as rank {found.rank} of one training. In a training, call torch.distributed.init_process_group first; where "
        f"each process trains for itself, unset {found.variables[0]}",
        UserWarning,
    )


def cores_per_rank(n_sharing: int = 1) -> int:
    """Usable cores for this process, at least one: the ranks on this machine share them.

    A launcher may have bound each rank to cores of its own, as Slurm and MPI do. So a rank gets its share of what the
    launcher has, and no more than it may use itself.

    Args:
        n_sharing: How many processes are known to share the cores of this one.
    """
    found, own = find_ranks(), max(1, usable_cores() // max(1, n_sharing))
    n_local = found.n_local or min(found.world_size, max((found.local_rank or 0) + 1, _n_gpus()))
    n_local = max(n_local, number_in_environment("LOCAL_WORLD_SIZE", 1))  # alone it is enough to share cores
    if n_local == 1:
        return own
    limits = core_limits()
    of_launcher = min([_launchers_cores(found), *(limits[name] for name in limits if name != "affinity")])
    return max(1, min(own, max(usable_cores(), of_launcher) // n_local))


def number_in_environment(name: str, default: int, environment: Mapping[str, str] = os.environ) -> int:
    """The number in a variable; `default` where there is none, as where another program left it empty."""
    try:
        return int(environment.get(name, default))
    except ValueError:
        return default


def senseless_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """What variables say that no launcher would have set so."""
    rank, world_size = environment.get("RANK"), number_in_environment("WORLD_SIZE", 0, environment)
    if rank and world_size > 1 and not 0 <= number_in_environment("RANK", -1, environment) < world_size:
        return [f"RANK={rank!r} and WORLD_SIZE={world_size}, and ranks go from 0 to {world_size - 1}"]
    return []


def _is_sensible(found: Ranks | None) -> bool:
    if found is None or not 0 <= found.rank < found.world_size:
        return False
    if found.local_rank is None or found.n_local is None:
        return True
    return 0 <= found.local_rank < found.n_local <= found.world_size and found.local_rank <= found.rank


# Launchers. Each reads the variables that it sets, and gives None if they are not all there.


def _torchrun(environment: Mapping[str, str]) -> Ranks | None:
    """torchrun, and what sets its variables: accelerate, DeepSpeed, and lines of one's own in a Slurm script."""
    numbers = {name: number_in_environment(name, -1, environment) for name in _TORCHRUN}
    rank, world_size, local_rank, n_local = numbers.values()
    names = tuple(name for name in _TORCHRUN if numbers[name] >= 0)
    world_size = n_local if "WORLD_SIZE" not in environment else world_size
    if rank < 0 or world_size < 1:
        return None
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else OWN_LINES
    found = Ranks(launcher, rank, world_size, local_rank, n_local, names)
    if local_rank >= 0 and n_local > 0 and not _meets_here(environment):
        return found
    slurm = _slurm(environment)
    if slurm and (slurm.rank, slurm.world_size) == (rank, world_size):
        return replace(found, local_rank=slurm.local_rank, n_local=slurm.n_local)
    here, n_here = _on_this_machine(rank, world_size, environment)
    return replace(found, local_rank=here, n_local=n_here)


def _lightning(environment: Mapping[str, str]) -> Ranks | None:
    """Lightning's own launcher: rank 0 sets these variables in its own process and for the other ranks that it starts.

    Source: lightning.fabric.strategies.launchers.subprocess_script
    """
    local_rank, world_size = (number_in_environment(name, -1, environment) for name in ("LOCAL_RANK", "WORLD_SIZE"))
    if local_rank < 0 or world_size < 1 or environment.get("RANK"):
        return None
    if number_in_environment("NODE_RANK", 0, environment):
        return None  # whose rank torch.distributed knows, later
    n_local = world_size if _meets_here(environment) else None
    return Ranks(LIGHTNING, local_rank, world_size, local_rank, n_local, ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK"))


def _open_mpi(environment: Mapping[str, str]) -> Ranks | None:
    names = (f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return _of_numbers(OPEN_MPI, environment, *names)


def _mpich(environment: Mapping[str, str]) -> Ranks | None:
    """Intel MPI, too."""
    return _of_numbers("MPICH", environment, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _of_numbers(launcher: str, environment: Mapping[str, str], *names: str) -> Ranks | None:
    """Of variables for rank, world size, and the two for this machine, which may be missing."""
    rank, world_size, local_rank, n_local = (number_in_environment(name, -1, environment) for name in names)
    if rank < 0 or world_size < 2:
        return None
    is_told = local_rank >= 0 and n_local > 0
    return Ranks(launcher, rank, world_size, local_rank if is_told else None, n_local if is_told else None, names)


def _slurm(environment: Mapping[str, str]) -> Ranks | None:
    """A task of `srun`. The script of `sbatch` has the numbers of a first task, too, and starts the tasks only.

    Source: srun(1) and sbatch(1), "OUTPUT ENVIRONMENT VARIABLES"
    """
    is_step = any(name in environment for name in ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"))
    if not is_step and environment.get("ENVIRONMENT") == "BATCH":
        return None
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    counted = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in environment else "SLURM_TASKS_PER_NODE"
    node = number_in_environment("SLURM_NODEID", 0, environment)
    on_nodes = [  # from such as 8(x2),4
        n_tasks
        for n_tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get(counted, ""))
        for _ in range(int(times or 1))
    ]
    if not 0 <= node < len(on_nodes):
        return _of_numbers(SLURM, environment, "SLURM_PROCID", size, "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
    here = {**environment, counted: on_nodes[node]}
    return _of_numbers(SLURM, here, "SLURM_PROCID", size, "SLURM_LOCALID", counted)


_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_LAUNCHERS = (_torchrun, _lightning, _open_mpi, _slurm, _mpich)  # Slurm's PMI also sets variables of MPICH


def _on_this_machine(rank: int, world_size: int, environment: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Local rank, and number of ranks on this machine, where the launcher does not tell both."""
    if _meets_here(environment):
        return rank, world_size
    local_rank, node = (number_in_environment(name, -1, environment) for name in ("LOCAL_RANK", "NODE_RANK"))
    if node > 0 <= local_rank < rank and not (rank - local_rank) % node:  # each machine has as many
        return local_rank, (rank - local_rank) // node
    return local_rank if local_rank >= 0 else None, None


def _meets_here(environment: Mapping[str, str]) -> bool:
    """Whether the ranks meet at an address that only this machine can reach."""
    return re.fullmatch(r"localhost|127\.[\d.]+|::1", environment.get("MASTER_ADDR", "")) is not None


def _launchers_cores(found: Ranks) -> int:
    """The cores of this machine that the launcher may use."""
    if found.launcher == SLURM:
        return number_in_environment("SLURM_CPUS_ON_NODE", usable_cores())
    try:
        return len(os.sched_getaffinity(os.getppid()))
    except (AttributeError, OSError):  # not Linux; the launcher is gone, or is another user's
        return usable_cores()


def _is_initialized() -> bool:
    """Whether `torch.distributed` is, in this process."""
    torch = sys.modules.get("torch")  # whoever watches a script imports nothing that the script does not
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


def _is_worker() -> bool:
    """Whether this process is a worker of a `DataLoader`, which does not know what its rank has initialized."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.utils.data.get_worker_info() is not None


def _n_gpus() -> int:
    torch = sys.modules.get("torch")
    return torch.cuda.device_count() if torch is not None else 0
