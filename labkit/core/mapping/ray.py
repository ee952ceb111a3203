"""A Ray cluster for `map_items`: tasks run where cores are free, and again if a machine is lost."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType

import psutil

from labkit.core.machine import install_command, usable_cores
from labkit.core.mapping.pools import Outcome, Pool, pack_items, run_packed, unpack_result

_TIMEOUT_S = 5.0


@contextmanager
def joined_cluster(address: str | None, num_tasks: int | None) -> Iterator[int]:
    """How many tasks to keep submitted, while the cluster is joined; a cluster joined earlier stays joined."""
    ray = _import_ray()
    with ExitStack() as joined:
        if not ray.is_initialized():
            _start_or_join_cluster(ray, address or os.environ.get("RAY_ADDRESS"))
            joined.callback(ray.shutdown)
        yield 2 * max(1, int(ray.cluster_resources().get("CPU", 1))) if num_tasks is None else max(1, num_tasks)


@contextmanager
def ray_pool(function: Callable) -> Iterator[Pool]:
    """Tasks of one core each. Ray sends the function once to each worker process, by value if a notebook defines it.

    Ray itself tries a task three more times (its default) if its machine or worker is lost.
    """

    def map_items(packed: list[Outcome]) -> tuple[float, list[Outcome]]:  # the name that Ray shows in its messages
        return run_packed(function, packed)

    task = _import_ray().remote(num_cpus=1)(map_items)
    yield Pool(lambda items: task.remote(pack_items(items)).future(), unpack_result)


def _start_or_join_cluster(ray: ModuleType, address: str | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options = {} if address else {"num_cpus": usable_cores(), "include_dashboard": False}
    before = set(psutil.Process().children())
    try:
        _check_reachable(address)
        # Not None, for which Ray joins whatever cluster runs on this machine.
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # a plain Exception if a node does not start in time
        _kill(set(psutil.Process().children()) - before, Path(str(ray.__file__)).parent)
        raise ConnectionError(
            f"no Ray cluster could be joined at {address or 'this machine'} ({error}): "
            "start one with `ray start --head`, and give its address as host:port"
        ) from error


def _kill(processes: set[psutil.Process], program: Path) -> None:
    """End those that run a program of Ray's: what it started before it failed, and would keep until this one ends."""
    for process in processes:
        with suppress(psutil.Error):
            if str(program) in " ".join(process.cmdline()):
                process.kill()
                process.wait(_TIMEOUT_S)


def _check_reachable(address: str | None) -> None:
    """Fail at once; Ray would try for more than a minute, and then end this process."""
    host, _, port = (address or "").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_TIMEOUT_S).close()


def _import_ray() -> ModuleType:
    try:
        import ray
    except ImportError as error:
        raise ImportError(f'engine="ray" needs Ray: {install_command("cluster")}') from error
    return ray
