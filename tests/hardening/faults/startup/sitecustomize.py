"""A trap in a process under test: at its n-th change (or reading) of files below a folder, a fault happens.

Python imports this by itself where the folder is on `PYTHONPATH`; workers that are spawned carry it on. What to do is
JSON in the variable `LABKIT_FAULT`:

    below   folders whose files count
    on      "change": opened for writing, renamed, removed, made; "read": opened for reading
    at      number of the event, from 1, in each process; 0: never
    workers true: only in other processes than the command's own
    log     file to which every event is written, or null
    mark    file that says that the fault has happened; it happens once, in whichever process comes first
    delay   seconds between event and fault
    signal, to        signal to "main" (the command), "group" (its process group) or "self"
    harm, path        "truncate", "remove" or "replace" a file; path null: the one of the event
"""

import json
import os
import sys
import threading

_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}


class Trap:
    """The audit hook."""

    def __init__(self, fault: dict):
        self.fault, self.count, self.busy = fault, 0, False
        self.below = tuple(folder.rstrip("/") + "/" for folder in fault["below"])

    def __call__(self, event: str, arguments: tuple) -> None:
        if self.busy or (event != "open" and event not in _CHANGES):
            return
        path = arguments[0]
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        path = os.path.join(os.getcwd(), os.fsdecode(path))
        elsewhere = self.fault.get("workers") and os.environ["LABKIT_FAULT_MAIN"] == str(os.getpid())
        if not elsewhere and path.startswith(self.below) and self._kind(event, arguments) == self.fault["on"]:
            self.count += 1
            self._log(f"{event} {path}")
            if self.count == self.fault["at"]:
                self._spring(path)

    @staticmethod
    def _kind(event: str, arguments: tuple) -> str:
        if event != "open":
            return "change"
        flags = arguments[2] if isinstance(arguments[2], int) else 0
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or any(c in (arguments[1] or "") for c in "wax+")
        return "change" if writes else "read"

    def _log(self, line: str) -> None:
        if self.fault.get("log"):
            self.busy = True
            try:
                with open(self.fault["log"], "a") as file:
                    file.write(f"{os.getpid()} {line!r}\n")
            finally:
                self.busy = False

    def _spring(self, path: str) -> None:
        if self.fault.get("delay"):
            timer = threading.Timer(self.fault["delay"], self._happen, (path,))
            timer.daemon = True
            timer.start()
        else:
            self._happen(path)

    def _happen(self, path: str) -> None:
        self.busy = True
        try:
            os.close(os.open(self.fault["mark"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:  # another process was first
            return
        finally:
            self.busy = False
        if "signal" in self.fault:
            _send(self.fault["signal"], self.fault["to"])
        else:
            self.busy = True
            harm(self.fault["harm"], self.fault.get("path") or path)
            self.busy = False


def _send(number: int, to: str) -> None:
    main = int(os.environ["LABKIT_FAULT_MAIN"])
    if to == "group":
        os.killpg(os.getpgid(main), number)
    else:
        os.kill(main if to == "main" else os.getpid(), number)


def harm(how: str, path: str) -> None:
    """Spoil a file as others might, while it is read."""
    if how == "remove":
        os.unlink(path)
    elif how == "truncate":
        os.truncate(path, os.path.getsize(path) // 2)
    elif how == "replace":
        with open(path + ".new", "wb") as file:
            file.write(b"another file of this name")
        os.replace(path + ".new", path)


def arm() -> None:
    """Set the trap that the environment asks for."""
    if "LABKIT_FAULT" in os.environ:
        os.environ.setdefault("LABKIT_FAULT_MAIN", str(os.getpid()))
        sys.addaudithook(Trap(json.loads(os.environ["LABKIT_FAULT"])))


arm()
