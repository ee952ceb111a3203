"""Looking at the calls of threads that run on meanwhile, for as long as one likes: CPython must not crash, nor hang.

    python -m tests.hardening.stress_calls --minutes 60

Each run is a process of some seconds that does one kind of work, while a thread of it looks at the calls of another as
often as it can.
"""

import argparse
import faulthandler
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress

from labkit.watching.lines import calls_of_thread

_RUN_S, _HANGS_S = 15.0, 200.0


class Cycle:
    """Garbage that only the collector finds, and whose finalizer lets other threads run."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        sum(number for number in range(3))


def recurse(depth, number):
    if not depth:
        raise ValueError(number)

    def one_more():
        return number + depth

    try:
        recurse(depth - 1, one_more())
    finally:
        Cycle()


def recursion():
    try:
        recurse(random.randrange(1, 60), 0)
    except ValueError as error:
        return error.__traceback__.tb_next


def numbers(depth):
    if depth:
        yield from numbers(depth - 1)
    yield from (number for number in range(depth))


async def numbers_later(depth):
    for number in range(depth % 4):
        yield number


async def gathered(depth):
    if depth:
        await gathered(depth - 1)
    return [number async for number in numbers_later(depth)]


def generators():
    for number in numbers(random.randrange(1, 20)):
        if number == 7:
            break  # closed when it is collected
    with suppress(StopIteration):
        gathered(random.randrange(1, 12)).send(None)


def threads():
    started = [threading.Thread(target=lambda: (recursion(), generators())) for _ in range(4)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


def forks():
    child = os.fork()
    if not child:
        threading.Thread(target=look, args=(threading.get_ident(),), daemon=True).start()
        for _ in range(100):
            recursion()
            generators()
        os._exit(0)
    if status := os.waitpid(child, 0)[1]:
        os.kill(os.getpid(), os.WTERMSIG(status) or signal.SIGABRT)


WORK = {"recursion": recursion, "generators": generators, "threads": threads, "forks": forks}


def look(thread):
    while True:
        time.sleep(5e-5)
        calls_of_thread(thread)


def run(work, seconds):
    """In a process of its own: work for some seconds."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(_HANGS_S, exit=True)
    sys.setswitchinterval(5e-6)
    gc.set_threshold(200, 5, 5)
    threading.Thread(target=look, args=(threading.get_ident(),), daemon=True).start()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20 if work in (recursion, generators) else 1):
            work()
    os._exit(0)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=_RUN_S, help="of each run")
    parser.add_argument("--work", choices=WORK, help="the one kind to do, in this process")
    options = parser.parse_args(arguments)
    if options.work:
        run(WORK[options.work], options.seconds)
    outcomes, end = Counter(), time.monotonic() + 60 * options.minutes
    while not outcomes or time.monotonic() < end:
        for work in WORK:
            command = [sys.executable, "-m", __spec__.name, "--work", work]
            process = subprocess.run(
                [*command, "--seconds", str(options.seconds)], check=False, stderr=subprocess.PIPE, text=True
            )
            outcomes[work, process.returncode] += 1
            if process.returncode:
                print(process.stderr, file=sys.stderr)
    for (work, status), count in sorted(outcomes.items()):
        print(f"{work}: {count} runs ended with {status}")
    return int(any(status for _, status in outcomes))


if __name__ == "__main__":
    sys.exit(main())
