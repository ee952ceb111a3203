"""What Linux says of a process and of the machine, in /proc and /sys: nothing of it is known on other systems.

Nothing is attached to a process, and only the standard library is imported.
"""

import ipaddress
import os
import re
import resource
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from labkit.util.machine import CGROUP, MEMBERSHIP, cgroup_folders


def descriptor_of(pid: int, paths: set[str]) -> str:
    """The link in /proc of a descriptor that a process has of one of these files."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for number in os.listdir(folder):
            with suppress(OSError):
                if os.readlink(f"{folder}/{number}") in paths:
                    return f"{folder}/{number}"
    return ""


def read_text(path: str | Path) -> str:
    """The contents of a file; empty if it cannot be read."""
    with suppress(OSError, ValueError):  # a group's name in a container may hold what no path can
        return Path(path).read_text(errors="replace")
    return ""


def state_of(pid: int) -> str:
    """The letter of the state of a process, as in `ps`; X: there is none; empty: the system has no /proc."""
    none = "X" if os.path.exists("/proc/self/stat") else ""
    return (read_text(f"/proc/{pid}/stat").rpartition(")")[2].split() or [none])[0]


# Numbers of the system calls that wait, on x86-64 and on 64-bit ARM.
_NUMBERS = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 4: "stat", 7: "poll", 17: "pread64", 23: "select", 35: "nanosleep",
        42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4",
        72: "fcntl", 73: "flock", 74: "fsync", 202: "futex", 217: "getdents64", 230: "clock_nanosleep",
        232: "epoll_wait", 247: "waitid", 257: "openat", 262: "newfstatat", 270: "pselect6", 271: "ppoll",
        281: "epoll_pwait", 332: "statx",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 32: "flock", 56: "openat", 61: "getdents64", 63: "read", 64: "write",
        67: "pread64", 72: "pselect6", 73: "ppoll", 79: "newfstatat", 82: "fsync", 95: "waitid", 98: "futex",
        101: "nanosleep", 115: "clock_nanosleep", 202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom",
        211: "sendmsg", 212: "recvmsg", 260: "wait4", 291: "statx",
    },
}  # fmt: skip
_OF_DESCRIPTORS = ("read", "write", "pread64", "recvfrom", "recvmsg", "sendto", "sendmsg", "connect", "accept", "flock")


def system_call(pid: int, thread: int) -> str:
    """The call in which a thread waits, with its file and its place in the kernel: `read /mnt/a.jpg (nfs_wait)`."""
    words, place = (
        read_text(f"/proc/{pid}/task/{thread}/syscall").split(),
        read_text(f"/proc/{pid}/task/{thread}/wchan"),
    )
    number = int(words[0]) if words and re.fullmatch("[0-9]+", words[0]) else -1
    name = _NUMBERS.get(os.uname().machine, {}).get(number, "")
    if name in _OF_DESCRIPTORS:
        with suppress(OSError, ValueError, IndexError):
            name += f" {_readable(pid, os.readlink(f'/proc/{pid}/fd/{int(words[1], 16)}'))}"
    return f"{name} ({place})".strip() if place not in ("", "0") else name


def _readable(pid: int, target: str) -> str:
    """A file with its file system, `/data/a.jpg [nfs4]`; a socket with whom it is connected to, `[10.0.0.1:80]`."""
    if found := re.fullmatch(r"socket:\[(\d+)\]", target):
        for table in ("tcp", "tcp6"):
            for row in read_text(f"/proc/{pid}/net/{table}").splitlines()[1:]:
                fields = row.split()
                if fields[9:10] == [found[1]]:
                    return f"[{_address(fields[2])}]"
        return "[socket]"
    return f"{target} [{mount_of(target).kind}]" if target.startswith("/") else target


def _address(text: str) -> str:
    """`0100007F:1F90` is 127.0.0.1:8080."""
    host, _, port = text.partition(":")
    with suppress(ValueError):
        packed = b"".join(bytes.fromhex(host[start : start + 8])[::-1] for start in range(0, len(host), 8))
        return f"{ipaddress.ip_address(packed)}:{int(port, 16)}"
    return "socket"


class Mount(NamedTuple):
    """A file system and where it is mounted: `ext4` at `/data`."""

    kind: str
    path: str


def mount_of(path: str, table: str | None = None) -> Mount:
    """The mount that a path is below: of kind ext4, nfs4, fuse.s3fs; `?` if it is not known.

    Args:
        path: An absolute path, without links.
        table: What `/proc/self/mountinfo` says. Default: that file.
    """
    best = Mount("?", "")
    for row in (read_text("/proc/self/mountinfo") if table is None else table).splitlines():
        fields, kinds = (part.split() for part in row.partition(" - ")[::2])
        if len(fields) < 5 or not kinds:
            continue
        mount = re.sub(r"\\([0-3][0-7]{2})", lambda code: chr(int(code[1], 8)), fields[4])  # `\040` is a space
        if len(mount) >= len(best.path) and (path + "/").startswith(mount.rstrip("/") + "/"):  # a later one is on top
            best = Mount(kinds[0], mount)
    return best


_SYSTEMS = re.compile(r"/(dev|proc|sys|usr)/|.*\.(so|py|pyc)\b|.*/labkit-scratch|pipe:|anon_inode:|/memfd:|.*deleted")


def open_files(pid: int) -> tuple[list[str], int]:
    """Files of data and sockets that a process has open, and how many descriptors in all."""
    found, folder = list[str](), f"/proc/{pid}/fd"
    with suppress(OSError):
        numbers = os.listdir(folder)
        for number in numbers:
            with suppress(OSError):
                target = os.readlink(f"{folder}/{number}")
                if not _SYSTEMS.match(target):
                    found.append(_readable(pid, target))
        return sorted(set(found) - {"[socket]"}), len(numbers)
    return found, 0


def shared_memory() -> tuple[int, int]:
    """Bytes of /dev/shm: free, and in all."""
    with suppress(OSError):
        found = os.statvfs("/dev/shm")  # noqa: S108 - where torch puts tensors that processes share
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    return 0, 0


def file_limit() -> int:
    """How many descriptors this process may have open: `ulimit -n`."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Throttling(NamedTuple):
    """What the quota of a cgroup has done so far.

    n_periods: In which the group ran; mostly of 100 ms.
    n_throttled: Of them, those before whose end the group had used up its quota.
    seconds: For which its threads then stood still, summed over the cores.
    """

    n_periods: int
    n_throttled: int
    seconds: float

    def __sub__(self, earlier: "Throttling") -> "Throttling":
        n_periods, n_throttled = self.n_periods - earlier.n_periods, self.n_throttled - earlier.n_throttled
        return Throttling(n_periods, n_throttled, self.seconds - earlier.seconds)


def parse_cpu_stat(text: str) -> Throttling | None:
    """What a cgroup's `cpu.stat` says, of version 1 or 2; None: it counts no periods.

    Source: the kernel's documentation, scheduler/sched-bwc and admin-guide/cgroup-v2.
    """
    counts = {name: int(count) for name, count in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}
    if "nr_throttled" not in counts:
        return None
    seconds = counts.get("throttled_usec", 0) / 1e6 + counts.get("throttled_time", 0) / 1e9
    return Throttling(counts.get("nr_periods", 0), counts["nr_throttled"], seconds)


def throttling(root: Path = CGROUP, membership: Path = MEMBERSHIP) -> dict[str, Throttling]:
    """What quotas have done to this process's cgroup and its parents, whose quotas limit it, too; by their folders."""
    read = {str(group): parse_cpu_stat(read_text(group / "cpu.stat")) for group in cgroup_folders(root, membership)}
    return {group: found for group, found in read.items() if found is not None}


class Pressure(NamedTuple):
    """For how long some task stood still for want of a resource.

    seconds: So far.
    last_minute: Share of the last minute, 0 to 1.
    """

    seconds: float
    last_minute: float


def parse_pressure(text: str) -> Pressure | None:
    """What a file of the kernel's pressure stall information says; None: nothing.

    Source: the kernel's documentation, accounting/psi.
    """
    found = re.search(r"^some .*avg60=(\d+\.?\d*) .*total=(\d+)$", text, re.MULTILINE)
    return Pressure(int(found[2]) / 1e6, float(found[1]) / 100) if found else None


def pressures(
    root: Path = CGROUP, membership: Path = MEMBERSHIP, machine: Path = Path("/proc/pressure")
) -> dict[str, Pressure]:
    """For how long some task of this process's cgroup stood still: for `cpu`, `io` and `memory`.

    Where cgroups do not count it, as those of version 1, it is some task of the machine.
    """
    read = {}
    for name in ("cpu", "io", "memory"):
        paths = [*(group / f"{name}.pressure" for group in cgroup_folders(root, membership)), machine / name]
        read[name] = parse_pressure(next(filter(None, map(read_text, paths)), ""))
    return {name: found for name, found in read.items() if found is not None}
