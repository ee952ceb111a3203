"""The surroundings of a process under test: its mounts, shared memory and rights, and the processes it leaves."""

import contextlib
import ctypes
import os
import subprocess
import time
from pathlib import Path

import psutil

MARKER = "LABKIT_FAULT_RUN"  # a variable that every process of a trial inherits

_CLONE_NEWNS, _PR_CAPBSET_DROP = 0x20000, 24
_OVERRIDE, _READ_SEARCH = 1, 2  # capabilities that let root ignore permissions
_libc = ctypes.CDLL(None, use_errno=True)


def make_own_mounts() -> bool:
    """Give this process and its children a mount namespace with an empty /dev/shm; False if that is not allowed."""
    if os.geteuid() != 0 or _libc.unshare(_CLONE_NEWNS) != 0:
        return False
    commands = (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"])
    return all(subprocess.run(command, check=False, capture_output=True).returncode == 0 for command in commands)


def mount_small(folder: Path, n_bytes: int) -> None:
    """Mount a disk of so many bytes."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={n_bytes}", "tmpfs", str(folder)], check=True)


def enlarge(folder: Path) -> None:
    """Make a disk of `mount_small` larger."""
    subprocess.run(["mount", "-o", "remount,size=256m", str(folder)], check=True)


def unmount(folder: Path) -> None:
    """Remove a disk of `mount_small`."""
    subprocess.run(["umount", "-l", str(folder)], check=True)


def obey_permissions() -> None:
    """Make this process and its children obey file permissions, even as root."""
    if os.geteuid() != 0:
        return
    for capability in (_OVERRIDE, _READ_SEARCH):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header, rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _libc.capget(header, rights)
    for set_ in range(3):  # effective, permitted, inheritable
        rights[set_] &= ~(1 << _OVERRIDE | 1 << _READ_SEARCH)
    if _libc.capset(header, rights) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _find_processes(run: str, session: int) -> dict[int, str]:
    """Return id -> command of all processes in the session or with the marker of the trial, without zombies."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if process.pid == os.getpid() or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                continue
            if os.getsid(process.pid) == session or process.environ().get(MARKER) == run:
                found[process.pid] = " ".join(process.cmdline())[:120]
    return found


def kill_leftovers(run: str, session: int, within_s: float) -> dict[int, str]:
    """Wait for the processes of a trial to end; kill those that live after so many seconds, and return them."""
    deadline = time.monotonic() + within_s
    while (found := _find_processes(run, session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    return found


def list_shared_memory() -> set[str]:
    """Return the names of all segments and semaphores."""
    return set(os.listdir("/dev/shm"))
