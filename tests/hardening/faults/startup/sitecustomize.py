"""A trap in a process under test: when it is about to change files below a folder for the n-th time, a signal comes.

Python imports this by itself where the folder is on `PYTHONPATH`; workers that are spawned carry it on. What to do is
JSON in the variable `LABKIT_FAULT`:

    below       folders whose files count: opened for writing, renamed, removed, made
    at          number of the change, from 1, in each process; 0: never
    workers     true: only in other processes than the command's own
    log         file to which each change adds its process
    mark        file that says that the signal was sent, by whichever process came first
    signal, to  signal to "main" (the command), "group" (its process group) or "self"
"""

import json
import os
import sys

_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}


class Trap:
    """The audit hook."""

    def __init__(self, fault: dict):
        self.fault, self.count = fault, 0
        self.below = tuple(folder.rstrip("/") + "/" for folder in fault["below"])

    def __call__(self, event: str, arguments: tuple) -> None:
        writes = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (event in _CHANGES or writes) and isinstance(arguments[0], (str, bytes, os.PathLike)):
            path = os.path.join(os.getcwd(), os.fsdecode(arguments[0]))
            is_main = os.environ["LABKIT_FAULT_MAIN"] == str(os.getpid())
            if path.startswith(self.below) and not (is_main and self.fault.get("workers")):
                self.note_change()

    def note_change(self) -> None:
        self.count += 1
        if "log" in self.fault:
            with open(self.fault["log"], "a") as file:
                file.write(f"{os.getpid()}\n")
        if self.count != self.fault["at"]:
            return
        try:
            os.close(os.open(self.fault["mark"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        main, number, to = int(os.environ["LABKIT_FAULT_MAIN"]), self.fault["signal"], self.fault["to"]
        if to == "group":
            os.killpg(os.getpgid(main), number)
        else:
            os.kill(main if to == "main" else os.getpid(), number)


if "LABKIT_FAULT" in os.environ:
    os.environ.setdefault("LABKIT_FAULT_MAIN", str(os.getpid()))
    sys.addaudithook(Trap(json.loads(os.environ["LABKIT_FAULT"])))
