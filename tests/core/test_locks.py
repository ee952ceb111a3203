"""File locks: one holder at a time, though the file comes and goes with the lock."""

import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from labkit.util.files import file_lock


def test_never_two_at_once(tmp_path):
    holders, most = [], []

    def hold(_):
        with file_lock(tmp_path / "new" / "lock"):
            holders.append(1)
            most.append(len(holders))
            time.sleep(0.0005)
            holders.pop()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(hold, range(200)))
    assert most == [1] * 200
    assert os.listdir(tmp_path / "new") == []


def test_a_killed_process_holds_nothing(tmp_path):
    code = f"""
import time
from pathlib import Path
from labkit.util.files import file_lock
with file_lock(Path({str(tmp_path)!r}, "lock")):
    print("held", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    process.kill()
    process.communicate()
    for _ in range(2):  # nor does a block that fails
        with pytest.raises(KeyError), file_lock(tmp_path / "lock"):
            raise KeyError(*os.listdir(tmp_path))
    assert os.listdir(tmp_path) == []


def test_a_worker_that_imports_its_script_does_not_wait_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError, match="__main__"), file_lock(tmp_path / "lock"):
        pass


def test_a_script_without_a_guard_ends(tmp_path):
    """Its workers import it, and would build the same thing: they must not wait for the lock that it holds."""
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from labkit.util.parallel import map_items\n"
        "from labkit.util.files import file_lock\n"
        f"with file_lock(Path({str(tmp_path / 'lock')!r})):\n"
        "    map_items(str, range(4), num_workers=2, progress=False)\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "__main__" in ended.stderr
