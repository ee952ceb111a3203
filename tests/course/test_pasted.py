"""What readers paste: the code under "Do this" of each notebook runs as it stands, and does what its sentence says.

The block of the stored notebook's first cell stands in a script between what its sentence takes for granted, such as
`names` and `load`, and a reader's use of it. Only numbers such as those of epochs are replaced.
"""

import json
import os
import pickle
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import tracemalloc
from functools import cache
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch

from tests.paths import REPO
from tests.tars import listed, make_tar, member

NOTEBOOKS = REPO / "notebooks"
START_METHODS = ("fork", "forkserver", "spawn")
NAMES = ["é.jpg", "写真 1.jpg", " b.jpg", "c.jpg ", os.fsdecode(b"\xff\xfe.jpg"), "-d.jpg", "e'\".jpg", "long" * 50]

# The first lines of each script: how its workers start.
STARTING = """
if __name__ == "__main__":
    import multiprocessing, sys
    multiprocessing.set_start_method(sys.argv[1])
"""


@cache
def do_this(stem: str) -> str:
    """The code that a notebook tells its readers to paste."""
    told = nbformat.read(NOTEBOOKS / f"{stem}.ipynb", as_version=4).cells[0].source
    told = told.partition("**Do this.**")[2].partition("**Not if.**")[0]
    return re.search(r"^```python\n(.*?)^```$", told, re.DOTALL | re.MULTILINE)[1]


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert text.count(old) == 1, f"{text.count(old)} times in the block: {old}"
        text = text.replace(old, new)
    return text


def pasted(stem: str, **given) -> dict:
    """The names that the block defines, run here."""
    names = dict(given)
    exec(compile(do_this(stem), stem, "exec"), names)  # noqa: S102
    return names


def run_script(folder: Path, *parts: str, start_method: str = "fork", environment: dict[str, str] | None = None):
    """What a script of these parts prints in its last line, as JSON; it runs in `folder`."""
    (folder / "train.py").write_text("\n".join([STARTING, *parts]))
    with tempfile.TemporaryDirectory() as sockets:  # workers leave theirs behind
        given = {**os.environ, "TMPDIR": sockets, **(environment or {})}
        command = [sys.executable, "-X", "utf8", "train.py", start_method]
        done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def odd_names(tmp_path_factory) -> Path:
    """A folder with `photos`, files whose names are not ASCII, each of which holds its number."""
    folder = tmp_path_factory.mktemp("named")
    (folder / "photos").mkdir()
    for number, name in enumerate(NAMES):
        (folder / "photos" / name).write_text(str(number))
    return folder


class TestSeeds:
    """03b: the same draws for any number of workers, others in each epoch, and the training keeps its generators."""

    STEM, N_EPOCHS = "03b_seeds_and_memory", 2
    BEFORE = """
import json, pathlib
def load(path):  # draws from all three generators
    with open(path) as file:
        return int(file.read()), random.random(), np.random.rand(), torch.rand((), dtype=torch.float64).item()
names = sorted(map(str, pathlib.Path("photos").iterdir()))
seen, own = [[], []], []
def step(epoch, batch):
    numbers, *draws = (part.tolist() for part in batch)
    seen[epoch] += zip(numbers, zip(*draws))
    own.append((random.random(), np.random.rand(), torch.rand((), dtype=torch.float64).item()))
if __name__ == "__main__":
    import random, numpy as np, torch
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
"""
    AFTER = """
if __name__ == "__main__":
    print(json.dumps({"seen": seen, "own": own}))
"""

    def train(self, folder, num_workers, kept, start_method="fork", loop="for batch in loader: step(epoch, batch)"):
        block = replaced(
            do_this(self.STEM),
            ("num_workers=8, persistent_workers=True", f"num_workers={num_workers}, persistent_workers={kept}"),
            ("batch_size=64", "batch_size=3"),
            ("range(90)", f"range({self.N_EPOCHS})"),
            ("for batch in loader: ...", loop),
        )
        return run_script(folder, self.BEFORE, block, self.AFTER, start_method=start_method)

    @pytest.fixture(scope="class")
    @classmethod
    def in_one_process(cls, odd_names):
        return cls().train(odd_names, 0, False)

    def test_each_epoch_has_every_photo_in_an_order_and_with_draws_of_its_own(self, in_one_process):
        first, second = in_one_process["seen"]
        orders = [[number for number, _ in epoch] for epoch in (first, second)]
        assert [sorted(order) for order in orders] == [list(range(len(NAMES)))] * 2
        assert len({tuple(order) for order in [*orders, range(len(NAMES))]}) == 3
        draws = [draw for _, drawn in [*first, *second] for draw in drawn]
        assert len(set(draws)) == len(draws)

    @pytest.mark.parametrize("kept", [True, False], ids=["kept", "new"])
    @pytest.mark.parametrize("num_workers", [1, 3])
    @pytest.mark.parametrize("start_method", START_METHODS)
    def test_any_number_of_workers_gives_the_same(self, in_one_process, odd_names, start_method, num_workers, kept):
        assert self.train(odd_names, num_workers, kept, start_method) == in_one_process

    def test_the_training_keeps_its_generators(self, in_one_process):
        python, numpy, of_torch = random.Random(1), np.random.RandomState(2), torch.Generator().manual_seed(3)
        one = lambda: [python.random(), numpy.rand(), torch.rand((), dtype=torch.float64, generator=of_torch).item()]
        assert in_one_process["own"] == [one() for _ in in_one_process["own"]]

    def test_an_epoch_that_the_training_leaves_early_changes_nothing_in_the_next(self, in_one_process, odd_names):
        leave = "for batch in [next(iter(loader))] if epoch == 0 else loader: step(epoch, batch)"
        assert self.train(odd_names, 2, True, loop=leave)["seen"][1] == in_one_process["seen"][1]


class TestIndexedTar:
    """09: every file of a tar by its name, and no other bytes."""

    STEM = "09_marigold_storage"
    MEMBERS = [
        *listed("plain:one folder/ twice:old link>plain hard=plain empty: twice:new gone:stays gone>plain"),
        member("é/写真.png", b"not ASCII"), member("long/" * 80 + "name.png", b"long"), member("big", bytes(range(256)) * 99),
    ]  # fmt: skip

    @pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
    def test_it_reads_what_tarfile_reads_and_knows_no_links(self, tmp_path, format):
        path = make_tar(tmp_path / "a.tar", self.MEMBERS, format=format)
        files, found = pasted(self.STEM)["IndexedTar"](path), {}
        with tarfile.open(path) as tar:
            found = {info.name: tar.extractfile(info).read() for info in tar if info.isreg()}
            assert set(files.index) == {name for name in found if tar.getmember(name).isreg()}
        assert {name: files.read(name) for name in files.index} == {n: found[n] for n in files.index}
        assert files.read("twice") == b"new"
        for name in ("link", "hard", "folder", "gone"):
            with pytest.raises(KeyError):
                files.read(name)

    def test_a_sparse_file_is_left_out(self, tmp_path):
        with open(tmp_path / "sparse.bin", "wb") as file:
            file.seek(1_000_000)
            file.write(b"end")
        (tmp_path / "plain.bin").write_bytes(b"plain")
        names = ["sparse.bin", "plain.bin"]
        subprocess.run(["tar", "--sparse", "-cf", "a.tar", *names], cwd=tmp_path, check=True)
        files = pasted(self.STEM)["IndexedTar"](tmp_path / "a.tar")
        with tarfile.open(tmp_path / "a.tar") as tar:
            assert tar.getmember("sparse.bin").issparse()
        assert files.read("plain.bin") == b"plain"
        with pytest.raises(KeyError):
            files.read("sparse.bin")

    @pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
    def test_a_compressed_tar_is_refused(self, tmp_path, mode):
        path = make_tar(tmp_path / "a.tar", self.MEMBERS, mode)  # whatever its name says
        with pytest.raises(tarfile.ReadError):
            pasted(self.STEM)["IndexedTar"](path)

    @pytest.mark.parametrize("cut", [100, 600, 5000])
    def test_a_tar_that_is_cut_off_is_refused(self, tmp_path, cut):
        path = make_tar(tmp_path / "a.tar", [member(f"{n}.png", bytes(5000)) for n in range(2)])
        os.truncate(path, cut)
        with pytest.raises(tarfile.ReadError):
            pasted(self.STEM)["IndexedTar"](path)

    BEFORE = """
import json
from torch.utils.data import DataLoader
"""
    AFTER = """
class Files:
    def __init__(self):
        self.files, self.names = IndexedTar("train.tar"), [*map(str, range(20)), "é.png"]
    def __len__(self):
        return len(self.names)
    def __getitem__(self, number):
        return self.names[number], self.files.read(self.names[number]).decode()

if __name__ == "__main__":
    files, epochs = Files(), []
    files[3]  # a look, before workers start
    for num_workers in (0, 2):
        for epoch in range(2):
            loader = DataLoader(files, 4, shuffle=True, num_workers=num_workers)
            epochs.append(sorted([name, text] for batch in loader for name, text in zip(*batch)))
    print(json.dumps(epochs))
"""

    @pytest.mark.parametrize("start_method", START_METHODS)
    def test_workers_read_it_even_after_a_look(self, tmp_path, start_method):
        make_tar(tmp_path / "train.tar", {**{str(n): bytes([65 + n]) * n for n in range(20)}, "é.png": b"not ASCII"})
        expected = sorted([*([str(n), chr(65 + n) * n] for n in range(20)), ["é.png", "not ASCII"]])
        epochs = run_script(tmp_path, self.BEFORE, do_this(self.STEM), self.AFTER, start_method=start_method)
        assert epochs == [expected] * 4


class TestRawPixels:
    """11b: pixels of one photo at a time go to disk, and whatever process opens them finds each again."""

    STEM = "11b_raw_pixels"
    SHAPES = [(3, 5, 3), (1, 1, 3), (7, 2, 3), (4, 4, 3)]

    def photos(self):
        return [
            np.random.default_rng(number).integers(0, 256, shape, np.uint8) for number, shape in enumerate(self.SHAPES)
        ]

    def test_each_photo_is_found_again_as_a_view(self, tmp_path):
        names = pasted(self.STEM)
        turned = [photo.swapaxes(0, 1) for photo in self.photos()]  # not contiguous
        names["pack"](iter(turned), str(tmp_path / "pixels"))
        found = names["Pixels"](str(tmp_path / "pixels"))
        assert all(np.array_equal(found[number], photo) for number, photo in enumerate(turned))
        assert np.shares_memory(found[2], found.memory)
        assert len(list(found)) == len(turned)
        assert len(pickle.dumps(names["Pixels"].__reduce__(found)[1])) < 1000

    def test_one_photo_is_in_memory_at_a_time(self, tmp_path):
        pack, mb = pasted(self.STEM)["pack"], 2**20
        tracemalloc.start()
        try:
            pack((np.full((1024, 1024, 1), number, np.uint8) for number in range(20)), str(tmp_path / "pixels"))
            assert tracemalloc.get_traced_memory()[1] < 5 * mb
        finally:
            tracemalloc.stop()

    def test_what_was_interrupted_has_no_name(self, tmp_path):
        names = pasted(self.STEM)

        def interrupted():
            yield from self.photos()
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            names["pack"](interrupted(), str(tmp_path / "pixels"))
        with pytest.raises(FileNotFoundError):
            names["Pixels"](str(tmp_path / "pixels"))
        with pytest.raises(FileExistsError):
            names["pack"](self.photos(), str(tmp_path / "pixels"))

    def test_floats_are_refused(self, tmp_path):
        with pytest.raises(AssertionError):
            pasted(self.STEM)["pack"]([np.zeros((2, 2, 3))], str(tmp_path / "pixels"))

    AFTER = """
import json, torch
class Photos:
    def __init__(self):
        self.photos = Pixels("pixels")
    def __len__(self):
        return 4
    def __getitem__(self, number):
        return number, int(self.photos[number].sum())

if __name__ == "__main__":
    photos, epochs = Photos(), []
    for num_workers in (0, 2):
        loader = torch.utils.data.DataLoader(photos, 2, shuffle=True, num_workers=num_workers)
        epochs += [sorted(zip(*(torch.cat(part).tolist() for part in zip(*loader)))) for epoch in range(2)]
    print(json.dumps([epochs, len(__import__("pickle").dumps(photos))]))
"""

    @pytest.mark.parametrize("start_method", START_METHODS)
    def test_another_process_and_its_workers_find_them(self, tmp_path, start_method):
        pasted(self.STEM)["pack"](self.photos(), str(tmp_path / "pixels"))
        epochs, pickled = run_script(tmp_path, do_this(self.STEM), self.AFTER, start_method=start_method)
        assert epochs == [[[number, int(photo.sum())] for number, photo in enumerate(self.photos())]] * 4
        assert pickled < 1000  # bytes, however large the pixels are
