"""A Ray cluster for `labkit.core.mapping.engines`: tasks go where cores are free, and anew when a machine is lost."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

import psutil

from labkit.core.machine import usable_cores
from labkit.core.mapping.pools import Outcome, Submit, pack, run_packed, unpacking

_PATIENCE_S = 5.0


@contextmanager
def joined_cluster(address: str | None, num_tasks: int | None) -> Iterator[int]:
    """How many tasks to keep submitted, while the cluster is joined; one that was joined before stays so."""
    ray = _import_ray()
    is_ours = not ray.is_initialized()
    if is_ours:
        _join(ray, address or os.environ.get("RAY_ADDRESS"))
    try:
        yield 2 * max(1, int(ray.cluster_resources().get("CPU", 1))) if num_tasks is None else max(1, num_tasks)
    finally:
        if is_ours:
            ray.shutdown()


@contextmanager
def ray_pool(function: Callable) -> Iterator[Submit]:
    """Tasks of one core each. Ray sends the function once to every worker process, by value if it is a notebook's.

    A task whose machine or worker is lost is tried three times more, Ray's default, before the engine hears of it.
    """

    def map_items(packed: list[Outcome]):  # the name that Ray's own messages show
        return run_packed(function, packed)

    task = _import_ray().remote(num_cpus=1)(map_items)

    def submit(items: list) -> Future:
        return unpacking(task.remote(pack(items)).future())

    yield submit


def _join(ray: ModuleType, address: str | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    alone = {} if address else {"num_cpus": usable_cores(), "include_dashboard": False}
    before = set(psutil.Process().children())
    try:
        _check_answers(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **alone)
    except Exception as error:  # the plain class where a node does not start in time
        _end({child for child in psutil.Process().children() if _runs(child, Path(ray.__file__).parent)} - before)
        raise ConnectionError(
            f"no Ray cluster could be joined at {address or 'this machine'} ({error}): "
            "start one with `ray start --head`, and give its address as host:port"
        ) from error


def _end(processes: set[psutil.Process]) -> None:
    """What Ray started before it failed, which it would keep until this process ends."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_PATIENCE_S)


def _runs(process: psutil.Process, program: Path) -> bool:
    try:
        return str(program) in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _check_answers(address: str | None) -> None:
    """Ray itself would try for more than a minute, and then end this process."""
    host, _, port = (address or "").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_PATIENCE_S).close()


def _import_ray() -> ModuleType:
    try:
        import ray
    except ImportError as error:
        raise ImportError('engine="ray" needs Ray: python -m pip install -e ".[cluster]"') from error
    return ray
