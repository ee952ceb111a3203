"""What surrounds a process under test: mounts and shared memory of its own, fewer rights, and who is left behind."""

import contextlib
import ctypes
import os
import subprocess
import time
from pathlib import Path

MARKER = "LABKIT_FAULT_RUN"  # a variable that every process of a trial inherits

_CLONE_NEWNS, _PR_CAPBSET_DROP, _PR_SET_SECUREBITS, _NO_SETUID_FIXUP = 0x20000, 24, 28, 0x5
_OVERRIDE, _READ_SEARCH = 1, 2  # capabilities by which root passes permissions over
_libc = ctypes.CDLL(None, use_errno=True)


def own_mounts() -> bool:
    """A mount namespace with an empty /dev/shm for this process and its children; False where that is not allowed."""
    if os.geteuid() != 0 or _libc.unshare(_CLONE_NEWNS) != 0:
        return False
    commands = (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"])
    return all(subprocess.run(command, check=False, capture_output=True).returncode == 0 for command in commands)


def mount_small(folder: Path, n_bytes: int) -> None:
    """A disk of so many bytes."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={n_bytes}", "tmpfs", str(folder)], check=True)


def enlarge(folder: Path) -> None:
    """Make room on a disk of `mount_small`."""
    subprocess.run(["mount", "-o", "remount,size=256m", str(folder)], check=True)


def unmount(folder: Path) -> None:
    """Take a disk of `mount_small` away."""
    subprocess.run(["umount", "-l", str(folder)], check=True)


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Rights(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


def obey_permissions() -> None:
    """Let file permissions bind this process and its children, even if it is root's."""
    if os.geteuid() != 0:
        return
    for capability in (_OVERRIDE, _READ_SEARCH):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header, rights = _Header(0x20080522, 0), (_Rights * 2)()
    _libc.capget(ctypes.byref(header), rights)
    keep = ~(1 << _OVERRIDE | 1 << _READ_SEARCH) & 0xFFFFFFFF
    for name in ("effective", "permitted", "inheritable"):
        setattr(rights[0], name, getattr(rights[0], name) & keep)
    if _libc.capset(ctypes.byref(header), rights) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def processes_of(run: str, session: int) -> dict[int, str]:
    """Process id -> command of all that live in the session, or carry the marker of the trial; no zombies."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                after_name = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                state, its_session = after_name[0], int(after_name[3])
                if state in "ZX":
                    continue
                marked = f"{MARKER}={run}\0".encode() in Path(f"/proc/{name}/environ").read_bytes()
                if its_session == session or marked:
                    command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(name)] = command[:120]
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


def left_behind(run: str, session: int, within_s: float) -> dict[int, str]:
    """Who of a trial still lives after so many seconds; they are killed then."""
    deadline = time.monotonic() + within_s
    while (found := processes_of(run, session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    return found


def shared_memory() -> set[str]:
    """Names of the segments and semaphores that live."""
    return set(os.listdir("/dev/shm"))
