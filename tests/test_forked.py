"""The fork server of the tests: its forks run scripts as new processes would."""

import json
import os
import signal
import subprocess
import sys
import time

from tests import forked
from tests.forked import run_python

SCRIPT = """
import json, multiprocessing, os, sys, tempfile
import numpy as np
def name_of(queue):
    queue.put(__name__)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    context.Process(target=name_of, args=(queue,)).start()
    print(json.dumps([sys.argv, sys.path[0], os.getcwd(), os.environ["MINE"], tempfile.gettempdir(), queue.get()]))
    print(np.random.rand(), file=sys.stderr)
    sys.exit(3)
"""


WAITS = """
import os, time
try:
    print(os.getpid(), flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    time.sleep(60)
"""


def test_a_script_gets_its_arguments_variables_folder_and_status(tmp_path):
    (tmp_path / "tried.py").write_text(SCRIPT)
    given = {**os.environ, "MINE": "é", "TMPDIR": str(tmp_path)}
    done, again = (run_python("tried.py", "-x", "é", cwd=tmp_path, env=given) for _ in range(2))
    assert (done.returncode, done.stderr != again.stderr) == (3, True)
    place = str(tmp_path)
    arguments = [f"{place}/tried.py", "-x", "é"]
    assert json.loads(done.stdout) == [arguments, place, place, "é", place, "__mp_main__"]


def test_an_error_and_a_signal_are_told_as_of_a_process(tmp_path):
    (tmp_path / "fails.py").write_text("raise ValueError('this')")
    (tmp_path / "dies.py").write_text("import os; os.kill(os.getpid(), 9)")
    failed = run_python("fails.py", cwd=tmp_path)
    assert (failed.returncode, failed.stderr.splitlines()[-1]) == (1, "ValueError: this")
    assert run_python("dies.py", cwd=tmp_path).returncode == -signal.SIGKILL


def test_a_fork_goes_with_what_stands_for_it_and_gets_its_signals(tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)
    command = [sys.executable, forked.__file__, "waits.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        process.kill()
    ends = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < ends:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}")
