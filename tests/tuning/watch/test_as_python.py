"""A script under `labkit watch` is what it is under `python`: what it sees, prints and saves, and how it ends."""

import inspect
import json
import os
import signal
import subprocess
import sys
import textwrap
import zipfile

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, dataloader

import labkit as lk
from tests.paths import REPO

SEEN = REPO / "tests" / "seen_script.py"
WATCH = ("-m", "labkit", "watch")
SAID = "labkit watch"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO)}

TRAINING = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

def train(loader):
    model = torch.nn.Linear(4, 1)
    steps = torch.optim.SGD(model.parameters(), 0.1)
    for batch in loader:
        model((batch[0] if isinstance(batch, (list, tuple)) else batch).flatten(1)[:, :4].float()).mean().backward()
        steps.step()

train(DataLoader(TensorDataset(torch.zeros(60, 4)), 2))
"""


def python(*words, **options):
    options = {"capture_output": True, "text": True, "timeout": 120, "env": ENVIRONMENT, **options}
    return subprocess.run([sys.executable, *map(str, words)], check=False, **options)


@pytest.fixture
def script(tmp_path):
    """Writes a script; returns its path."""

    def write(text, name="train.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return tmp_path / name

    return write


def under_both(path, *arguments, **options):
    """The script's process under `python`, and under `labkit watch`; both must print the same and end alike."""
    plain, watched = python(path, *arguments, **options), python(*WATCH, path, *arguments, **options)
    assert (watched.returncode, watched.stdout) == (plain.returncode, plain.stdout), watched.stderr
    return plain, watched


@pytest.mark.parametrize(
    ("options", "arguments"),
    [([], ["a", "--b"]), (["-u", "-W", "error::SyntaxWarning", "-X", "utf8"], ["trains"])],
)
def test_a_script_sees_the_process_that_it_sees_under_python(options, arguments):
    """Its environment, path, signals, streams and threads; and with OMP_NUM_THREADS and MPLBACKEND that it sets."""
    plain, watched = (python(*options, *words, SEEN, *arguments) for words in ((), WATCH))
    assert watched.returncode == plain.returncode == 0, watched.stderr + plain.stderr
    seen, expected = json.loads(watched.stdout), json.loads(plain.stdout)
    assert seen == expected
    assert (SAID in watched.stderr, seen["imported"]) == (True, [])
    if arguments == ["trains"]:
        assert (seen["training"]["threads"], seen["training"]["backend"]) == (1, "svg")


def test_a_program_is_found_as_python_finds_it(tmp_path, script):
    """By a relative path, a link, a folder, a zip, or its module's name."""
    says = (
        "import sys\nmain = sys.modules['__main__']\n"
        "print(sys.argv, sys.path[:2], __file__, __name__, __package__, __spec__ and __spec__.name, __cached__)\n"
        "print(sys._getframe().f_code.co_filename)\n"
    )
    for folder in ("real", "linked", "pack"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("import sys\nprint(sys.argv)\n")
    for name in ("real/train.py", "pack/__main__.py", "pack/part.py"):
        script(says, name)
    (tmp_path / "linked" / "train.py").symlink_to("../real/train.py")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as packed:
        packed.writestr("__main__.py", says)
    for words in (
        ["real/train.py", "-m", "--steps=3"], ["./linked/train.py"], ["real/../pack/"], ["packed.zip", "x"],
        ["-m", "pack", "x"], ["-m", "pack.part"],
    ):  # fmt: skip
        plain, watched = python(*words, cwd=tmp_path), python(*WATCH, *words, cwd=tmp_path)
        assert (watched.stdout, watched.returncode) == (plain.stdout, 0), words


def test_files_are_written_where_watch_was_started(tmp_path, script):
    path = script("import os\nos.mkdir('elsewhere')\nos.chdir('elsewhere')\n" + TRAINING)
    done = python(*WATCH, "--json", "found.json", path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "found.json").read_text())["n_batches"] > 0


HANDLERS = {
    "that calls the one before it and saves": """
        def save(number, frame):
            if callable(before): before(number, frame)
            print("saved", before)
            sys.exit(0)
        before = signal.signal(signal.SIGTERM, save)
    """,
    "that it takes back": "signal.signal(signal.SIGTERM, signal.signal(signal.SIGTERM, print))",
    "that it ignores": "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "of none": "",
    "that a number stands for": "print(signal.signal(15, 0))",
    "that ends it by itself": """
        def end(number, frame):
            print("ends", flush=True)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        signal.signal(signal.SIGTERM, end)
    """,
}


@pytest.mark.parametrize("handler", HANDLERS)
def test_sigterm_does_what_it_does_under_python(script, handler):
    begin, end = "import os, signal, sys\n", "os.kill(os.getpid(), signal.SIGTERM)\nprint('goes on')\n"
    shows = "print(getattr(handler := signal.getsignal(signal.SIGTERM), '__name__', handler), flush=True)\n"
    text = textwrap.dedent(HANDLERS[handler])
    plain, watched = under_both(script(f"{begin}{text}\n{shows}{end}"))
    assert watched.stderr.count(SAID) == 1
    assert plain.returncode in (0, -signal.SIGTERM)


def test_a_process_that_a_script_forks_has_no_handler(script):
    path = script("""
        import os, signal, time
        if not (child := os.fork()):
            print(signal.getsignal(signal.SIGTERM), flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        print(os.waitpid(child, 0)[1])
    """)
    assert under_both(path)[1].stderr.count(SAID) == 1


LOGGER = """
class Logger:
    def write(self, text): log.append(text)
    def flush(self): pass
log = []
"""
STREAMS = {
    "a logger for stderr": LOGGER + "sys.stderr = Logger()\natexit.register(lambda: print(log))",
    "a logger for stdout": LOGGER + "print('before')\nsys.stdout = Logger()",
    "no streams": "sys.stdout = sys.stderr = None",
    "closed streams": "sys.stderr.close()\nsys.stdout.close()",
    "print is another": "import builtins\nprint('before')\nbuiltins.print = lambda *words: 1 / 0",
    "warnings are errors": "import warnings\nwarnings.simplefilter('error')",
    "descriptor 2 is a file": "os.dup2(os.open('log', os.O_CREAT | os.O_RDWR), 2)\nsys.stderr.write('script ')",
    "descriptor 2 is free": "os.close(2)\nfile = open('log', 'w')\nfile.write('script ')",
}
ENDS = {0: "", 3: "sys.exit(3)"}


@pytest.mark.parametrize("status", ENDS)
@pytest.mark.parametrize("streams", STREAMS)
def test_whatever_becomes_of_the_streams_the_end_is_the_scripts(tmp_path, script, streams, status):
    path = script(f"import atexit, os, sys\n{STREAMS[streams]}\n{ENDS[status]}\n")
    logs = []
    for words in ((), WATCH):
        done = python(*words, path, cwd=tmp_path)
        log = tmp_path / "log"
        logs.append((done.returncode, done.stdout, log.read_text() if log.exists() else None))
        log.unlink(missing_ok=True)
    assert logs[0] == logs[1]
    assert logs[0][0] == status or streams in ("closed streams", "no streams")
    assert done.stderr.count(SAID) == 1, "the report goes to the terminal"


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", ">&- 2>&-", "2>/dev/full", "2>&1 >/dev/full"])
def test_streams_that_are_closed_from_the_start_stay_so(tmp_path, script, closed):
    path = script("""
        import sys
        file = open("saved", "w")
        file.write(f"{file.fileno()} {sys.stdin} {sys.stdout} {sys.stderr}".replace("w+", "w"))
        file.close()
        sys.exit(3)
    """)
    ends = []
    for words in ("", " ".join(WATCH)):
        command = f'"{sys.executable}" {words} "{path}" {closed}'
        done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=ENVIRONMENT, timeout=120, check=False)
        ends.append((done.returncode, (tmp_path / "saved").read_text()))
    assert ends[0] == ends[1]
    assert ends[0][0] == 3


def test_a_pipe_that_nobody_reads_changes_nothing(script):
    read, write = os.pipe()
    os.close(read)
    try:
        path = script("import sys\nprint('done')\nsys.exit(3)\n")
        done = python(*WATCH, path, capture_output=False, stdout=subprocess.PIPE, stderr=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stdout) == (3, "done\n")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("sys.modules['pandas'] = None", "there is no report: ModuleNotFoundError"),
        ("sys.stderr = type('Logger', (), {'write': lambda *_: 0, 'flush': lambda *_: None})()", "Were data free"),
        ("import numpy\nnumpy.seterr(all='raise')", "Were data free"),
        ("torch.set_default_device('meta')", "Were data free"),
    ],
)
def test_a_report_that_fails_is_one_line_and_the_status_stands(script, change, said):
    done = python(*WATCH, script(f"{TRAINING}\n{change}\nprint('saved')\nsys.exit(3)\n"))
    assert (done.returncode, done.stdout) == (3, "saved\n"), done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "ranks",
    [
        {"LOCAL_WORLD_SIZE": "2"}, {"LOCAL_WORLD_SIZE": ""}, {"LOCAL_WORLD_SIZE": "0", "RANK": "0", "LOCAL_RANK": "0"},
        {"LOCAL_WORLD_SIZE": "-1", "RANK": "-1", "LOCAL_RANK": "-1"},
        {"LOCAL_WORLD_SIZE": "2", "RANK": "-1", "LOCAL_RANK": "-1"},
        {"LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
    ],
)  # fmt: skip
def test_ranks_of_another_program_are_none(script, ranks):
    """Left over in the environment, or empty: nobody is waited for, and nobody else reports."""
    done = python(*WATCH, script(f"{TRAINING}\nsys.exit(3)\n"), env={**ENVIRONMENT, **ranks})
    assert (done.returncode, done.stderr.count(f"{SAID} ")) == (3, 1), done.stderr


def test_a_step_that_copies_fill_whole_has_a_report():
    model = torch.nn.Linear(4, 1)
    steps = torch.optim.SGD(model.parameters(), 0.1)
    with lk.watch() as watched:
        for (batch,) in DataLoader(TensorDataset(torch.zeros(60, 4)), 2):
            model(batch).mean().backward()
            steps.step()
        watched.observer.device.copy_s.append(1000.0)
    found = watched.report()
    assert "hardly anything would be left" in repr(found)
    assert sum(found.shares.values()) == pytest.approx(1)
    json.dumps(found.to_dict(), allow_nan=False)


MAKES = f"""{TRAINING}
import labkit as lk

def make(num_workers):
    data = lk.ImageDataset(lk.FolderStore(sys.argv[1]), transform=lambda image: image[:, :8, :8])
    return lk.make_loader(data, lk.LoaderConfig(batch_size=2, num_workers=num_workers))
"""


def test_make_loader_is_seen_in_a_watched_script(tmp_path, script, photo_set):
    path = script(f"{MAKES}\ntrain(make(0))\ntrain(make(2))\n")
    done = python(*WATCH, "--json", tmp_path / "found.json", path, photo_set)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["loaders"]
    assert [(row["num_workers"], row["n_batches"]) for row in rows] == [(0, 30), (0, 12), (2, 12)]
    assert all(row["role"].startswith("training") for row in rows)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_make_loader_is_seen_wherever_it_is_made(script, photo_set, num_workers):
    """In the block, before it, and before it with an epoch that has started its workers."""
    path = script(f"""{MAKES}
def watched(loader):
    with lk.watch() as watched:
        train(loader or make({num_workers}))
    [row] = watched.report().loaders.itertuples()
    print(row.num_workers, row.n_batches, row.role)

used = make({num_workers})
train(used)
for loader in (None, make({num_workers}), used):
    watched(loader)
""")
    done = python(path, photo_set)
    assert done.stdout.splitlines() == 3 * [f"{num_workers} 12 training"], done.stderr


class OwnIterator(DataLoader):
    """Makes its iterator itself, as some projects' loaders do."""

    def _get_iterator(self):
        from torch.utils.data import dataloader

        return dataloader._MultiProcessingDataLoaderIter(self) if self.num_workers else super()._get_iterator()


class Endless(DataLoader):
    """Keeps one iterator for good, made as the loader is, as YOLO's and timm's loaders do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches = super().__iter__()

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.batches)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [DataLoader, OwnIterator, Endless])
@pytest.mark.parametrize("made", ["before", "within"])
def test_loaders_that_start_their_workers_in_their_own_way_are_seen(kind, num_workers, made):
    def make():
        return kind(TensorDataset(torch.zeros(40, 4)), 2, num_workers=num_workers, persistent_workers=num_workers > 0)

    loader = make() if made == "before" and kind is not Endless else None
    if loader is not None:
        list(loader)
    with lk.watch() as watched:
        loader = loader or make()
        for _ in loader:
            pass
    [row] = watched.report().loaders.itertuples()
    assert (row.n_batches, row.num_workers) == (20, num_workers)
    assert not [name for name in (*vars(loader), *vars(type(loader))) if "labkit" in name]


def test_what_is_patched_keeps_its_parameters():
    methods = [
        (kind, name)
        for kind in vars(dataloader).values()
        if isinstance(kind, type) and kind.__module__ == dataloader.__name__
        for name, method in vars(kind).items()
        if inspect.isfunction(method)
    ]
    before = [str(inspect.signature(getattr(kind, name))) for kind, name in methods]
    with lk.watch():
        assert [str(inspect.signature(getattr(kind, name))) for kind, name in methods] == before
