"""What labkit does with torch and nothing else: in an environment that has no more, for old and new torch.

    python -m pip install torch==2.5.1 && python -m tests.hardening.base

Needs no library itself. `tests/app/test_base.py` runs it where all other libraries are hidden.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
TRAIN = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset


def train(num_workers):
    data = TensorDataset(torch.randn(160, 8), torch.zeros(160, dtype=torch.long))
    weight = torch.zeros(8, 4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    for _ in range(2):
        for inputs, labels in DataLoader(data, 4, num_workers=num_workers):
            torch.nn.functional.cross_entropy(inputs @ weight, labels).backward()
            optimizer.step()


if __name__ == "__main__":
    train(int(sys.argv[1]))
"""
BLOCK = """
import labkit as lk
import sys
from train import train

with lk.watch() as watched:
    train(0)
report = watched.report()
print(report.loaders[0]["n_batches"], len(watched.epochs), report._repr_html_()[:4])
print(*sorted({"pandas", "scipy", "psutil", "matplotlib"} & set(sys.modules)))
"""


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "LABKIT_HOME": str(folder / "home"), **variables}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def check(folder: Path, **variables: str) -> None:
    """Watch a training with and without workers, compare the reports, ask the doctor, and watch a block."""
    (folder / "train.py").write_text(TRAIN)
    (folder / "block.py").write_text(BLOCK)
    for num_workers in ("0", "2"):
        files = [f"{num_workers}.json", f"{num_workers}.html"]
        words = ["-m", "labkit", "watch", "--json", files[0], "--html", files[1], "train.py", num_workers]
        done = run(folder, *words, **variables)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("wrote") == 2, done.stderr
        found, page = json.loads((folder / files[0]).read_text()), (folder / files[1]).read_text()
        assert abs(sum(found["shares"].values()) - 1) < 1e-6
        assert found["n_batches"] >= 60
        assert (found["loaders"][0]["n_batches"], found["loaders"][0]["num_workers"]) == (80, int(num_workers))
        assert page.count("data:image/svg+xml;base64,") == 2
    done = run(folder, "-m", "labkit", "diff", "0.json", "2.json", **variables)
    assert "num_workers 0 -> 2" in done.stdout, done.stdout + done.stderr
    assert re.search(r"^time of an image .* ms -> .* ms: ", done.stdout, re.MULTILINE), done.stdout
    done = run(folder, "-m", "labkit", "doctor", **variables)
    assert re.search(r"^usable cores .*\n(?s:.*)^torch +\d", done.stdout, re.MULTILINE), done.stderr
    done = run(folder, "block.py", **variables)
    assert done.stdout == "80 2 <img\n\n", done.stdout + done.stderr


def check_plan() -> None:
    """pip would install labkit, and nothing beside it."""
    words = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", str(REPO)]
    planned = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)["install"]
    assert [each["metadata"]["name"] for each in planned] == ["labkit-images"], planned


if __name__ == "__main__":
    check_plan()
    with tempfile.TemporaryDirectory() as place:
        check(Path(place))
    print("watch, diff, doctor and lk.watch run, and pip would install labkit alone")
