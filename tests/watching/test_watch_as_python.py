"""A script under `labkit watch` is what it is under `python`: what it sees, prints and saves, and how it ends."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from labkit.errors import CannotRun
from labkit.watching.script import Script
from tests.paths import REPO
from tests.watching.trained import ENVIRONMENT

SEEN, TRAINS = (REPO / "tests" / "watching" / f"{name}_script.py" for name in ("seen", "training"))
WATCH = ("-m", "labkit", "watch")
SAID, REPORTED = "labkit watch", "\n  waiting for data "

TRAINING = """
import os, sys
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


UNSTEPPED = """
import torch
from torch.utils.data import DataLoader, TensorDataset

weight = torch.zeros(4, 1, requires_grad=True)
loader = DataLoader(TensorDataset(torch.ones(600, 4)), 2)

def descend():
    with torch.no_grad():
        weight.sub_(1e-6 * weight.grad)
    weight.grad = None
"""
LOOPS = {
    "an optimizer of its own": """
for batch, in loader:
    (batch @ weight).mean().backward()
    descend()
""",
    "steps once an epoch": """
steps = torch.optim.SGD([weight], 1e-6)
for epoch in range(2):
    for batch, in loader:
        (batch @ weight).mean().backward()
    steps.step()
    steps.zero_grad()
""",
    "no gradients, and a long epoch": """
torch.set_grad_enabled(False)
for epoch in range(3):
    for batch, in loader:
        weight.sub_(1e-6 * batch.mean())
""",
    "no gradients, and it saves": """
torch.set_grad_enabled(False)
for batch, in DataLoader(TensorDataset(torch.ones(60, 4)), 2):
    weight.sub_(1e-6 * batch.mean())
torch.save(weight, 'model')
""",
}
FIRST, *REST = LOOPS


def python(*words, **options):
    options = {"capture_output": True, "text": True, "timeout": 250, "env": ENVIRONMENT, **options}
    return subprocess.run([sys.executable, *map(str, words)], check=False, **options)


def two_at_once(*commands, **options):
    """What `python` gives for each, in order."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda words: python(*words, **options), commands))


@pytest.fixture
def script(tmp_path):
    """Writes a script; returns its path."""

    def write(text, name="train.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return tmp_path / name

    return write


def under_both(path, *arguments, **options):
    """The script's process under `python`, and under `labkit watch`; both must print the same and end alike."""
    plain, watched = two_at_once((path, *arguments), (*WATCH, path, *arguments), **options)
    assert (watched.returncode, watched.stdout) == (plain.returncode, plain.stdout), watched.stderr
    assert watched.stderr.count(SAID) == 1
    return plain, watched


class TestBeginning:
    def test_a_script_sees_the_process_that_it_sees_under_python(self):
        """Its environment, path, signals, streams and threads; and with OMP_NUM_THREADS and MPLBACKEND that it sets."""
        options = ["-u", "-W", "error::SyntaxWarning", "-X", "utf8"]
        plain, watched = two_at_once(*((*options, *words, SEEN, "trains") for words in ((), WATCH)))
        assert watched.returncode == plain.returncode == 0, watched.stderr + plain.stderr
        seen, expected = json.loads(watched.stdout), json.loads(plain.stdout)
        assert seen == expected
        assert (SAID in watched.stderr, seen["imported"]) == (True, [])
        assert (seen["training"]["threads"], seen["training"]["backend"]) == (1, "svg")
        assert len(seen["training"]["losses"]) == 80

    @pytest.mark.parametrize("kind", ["a folder", "a zip", "a package"])
    def test_a_main_module_sees_what_it_sees_under_python(self, tmp_path, kind):
        (folder := tmp_path / "trains").mkdir()
        shutil.copy(SEEN, folder / "__main__.py")
        zipped = shutil.make_archive(str(tmp_path / "zipped"), "zip", folder)
        words = {"a folder": ["trains"], "a zip": [Path(zipped).name], "a package": ["-m", "trains"]}[kind]
        plain, watched = two_at_once(*((*first, *words, "a", "--b") for first in ((), WATCH)), cwd=tmp_path)
        assert watched.returncode == plain.returncode == 0, watched.stderr + plain.stderr
        assert json.loads(watched.stdout) == json.loads(plain.stdout)

    def test_a_training_and_its_workers_import_none_but_the_scripts_libraries(self, script):
        """What the script's own imports bring along is known from `python`: torch, and what that needs."""
        path = script("""
            import json, sys

            def imported():
                names = {name.partition(".")[0] for name in sys.modules if not name.startswith("_sysconfigdata")}
                return sorted(names - sys.stdlib_module_names)

            found = {"before its imports": imported()}
            import torch
            from torch.utils.data import DataLoader, Dataset

            class Data(Dataset):
                def __len__(self): return 8
                def __getitem__(self, index): return imported()

            if __name__ == "__main__":
                model = torch.nn.Linear(4, 1)
                steps = torch.optim.SGD(model.parameters(), 0.1)
                for how in (None, "spawn"):
                    options = {"num_workers": 1, "multiprocessing_context": how} if how else {}
                    for found[f"makes batches, {how}"] in DataLoader(Data(), 2, collate_fn=max, **options):
                        model(torch.zeros(4)).backward()
                        steps.step()
                        found["trains"] = imported()
                json.dump(found, sys.stdout)
        """)
        plain, watched = two_at_once((path,), (*WATCH, path))
        own, found = json.loads(plain.stdout), json.loads(watched.stdout)
        more = {place: [each for each in found[place] if each not in own[place]] for place in own}
        assert more == {place: ["labkit"] for place in own}
        assert len(own) == 4
        assert REPORTED in watched.stderr

    def test_a_program_is_found_as_python_finds_it(self, tmp_path, script):
        """By a relative path, a link, or its module's name."""
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
        programs = [
            ["real/train.py", "-m", "--steps=3"], ["./linked/train.py"],
            ["-m", "pack", "x"], ["-m", "pack.part"],
        ]  # fmt: skip
        plain = two_at_once(*programs, cwd=tmp_path)
        watched = two_at_once(*([*WATCH, *words] for words in programs), cwd=tmp_path)
        assert [(done.stdout, done.returncode) for done in watched] == [(done.stdout, 0) for done in plain]

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["no.py"], "cannot read no.py"),
            (["-m", "no_module"], "there is no module no_module here"),
            (["pack.part"], "for a module, write -m before its name"),
            (["python3", "train.py"], "write the script alone"),
            (["-m", "importlib"], "name the module in it that trains"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_run_is_said(self, words, said, monkeypatch):
        monkeypatch.setattr("sys.argv", [*sys.argv])
        monkeypatch.setattr("sys.path", [*sys.path])
        with pytest.raises(CannotRun, match=said):
            Script(words)

    def test_what_is_no_python_is_one_line(self, script):
        done = python(*WATCH, path := script("def :\n"))
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"{path} is no Python script" in done.stderr


HANDLERS = {
    "that calls the one before it and saves": """
        def save(number, frame):
            if callable(before): before(number, frame)
            print("saved", before)
            sys.exit(0)
        before = signal.signal(signal.SIGTERM, save)
    """,
    "that it takes back": "signal.signal(signal.SIGTERM, signal.signal(signal.SIGTERM, print))",
    "of none": "",
    "that a number stands for": "print(signal.signal(15, 0))",
}

# torch's handler of SIGCHLD raises wherever the process is, so also when the report is made.
NEWS = """
    import atexit, os, signal, sys
    def news(number, frame): raise RuntimeError("DataLoader worker (pid 7) is killed")
    def first(module, name):
        original = getattr(module, name)
        def once(*words):
            if words[:1] in ((), (signal.SIGCHLD,)):
                setattr(module, name, original)
                news(17, None)
            return original(*words)
        setattr(module, name, once)
    signal.signal(signal.SIGCHLD, news)
    atexit.register(lambda: print(signal.getsignal(signal.SIGCHLD) is news))
"""
ARRIVES = {
    "before the report": "first(os, 'getpid')",
    "as its handler is set aside": "first(signal, 'signal')",
    "during the report": """
        class Finder:  # which is looked at as the observation ends
            def find_spec(self, *words): return None
            def __eq__(self, other): signal.raise_signal(signal.SIGCHLD)
        sys.meta_path.insert(0, Finder())
    """,
}


class TestSignals:
    @pytest.mark.parametrize("handler", HANDLERS)
    def test_a_handler_of_sigterm_does_what_it_does_under_python(self, script, handler):
        begin, end = "import os, signal, sys\n", "os.kill(os.getpid(), signal.SIGTERM)\nprint('goes on')\n"
        shows = "print(getattr(handler := signal.getsignal(signal.SIGTERM), '__name__', handler), flush=True)\n"
        plain, _ = under_both(script(f"{begin}{textwrap.dedent(HANDLERS[handler])}\n{shows}{end}"))
        assert plain.returncode in (0, -signal.SIGTERM)

    def test_a_process_that_a_script_forks_has_no_handler(self, script):
        path = script("""
            import os, signal, time
            if not (child := os.fork()):
                print(signal.getsignal(signal.SIGTERM), flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            print(os.waitpid(child, 0)[1])
        """)
        under_both(path)

    @pytest.mark.parametrize("when", ARRIVES)
    def test_news_of_a_worker_does_not_keep_the_report_back(self, script, when):
        plain, watched = under_both(script(f"{textwrap.dedent(NEWS)}\n{textwrap.dedent(ARRIVES[when])}\n1 / 0\n"))
        assert (plain.returncode, plain.stdout) == (1, "True\n")
        assert watched.stderr.count("ZeroDivisionError") == 1
        assert "pid 7" not in watched.stderr


LOGGER = """
class Logger:
    def write(self, text): log.append(text)
    def flush(self): pass
log = []
"""
STREAMS = {
    "a logger for stderr": LOGGER + "sys.stderr = Logger()\natexit.register(lambda: print(log))",
    "no streams": "sys.stdout = sys.stderr = None",
    "closed streams": "sys.stderr.close()\nsys.stdout.close()",
    "descriptor 2 is a file": "os.dup2(os.open('log', os.O_CREAT | os.O_RDWR), 2)\nsys.stderr.write('script ')",
    "all files are closed": "os.closerange(3, 4096)",
    "descriptor 2 is free": "os.close(2)\nfile = open('log', 'w')\nfile.write('script ')",
}


class TestStreams:
    @pytest.mark.parametrize(("streams", "status"), [*((streams, 3) for streams in STREAMS), ("closed streams", 0)])
    def test_whatever_becomes_of_them_the_end_is_the_scripts(self, tmp_path, script, streams, status):
        path = script(f"import atexit, os, sys\n{STREAMS[streams]}\n{'sys.exit(3)' if status else ''}\n")
        ends, log = [], tmp_path / "log"
        for words in ((), WATCH):
            done = python(*words, path, cwd=tmp_path)
            ends.append((done.returncode, done.stdout, log.read_text() if log.exists() else None))
            log.unlink(missing_ok=True)
        assert ends[0] == ends[1]
        assert ends[0][0] == status or streams in ("closed streams", "no streams")
        assert done.stderr.count(SAID) == 1, "the report goes to the terminal"

    @pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "2>/dev/full"])
    def test_that_are_closed_from_the_start_stay_so(self, tmp_path, script, closed):
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
            done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=ENVIRONMENT, timeout=250, check=False)
            ends.append((done.returncode, (tmp_path / "saved").read_text()))
        assert ends[0] == ends[1]
        assert ends[0][0] == 3

    def test_a_pipe_that_nobody_reads_changes_nothing(self, script):
        read, write = os.pipe()
        os.close(read)
        try:
            path = script("import sys\nprint('done')\nsys.exit(3)\n")
            done = python(*WATCH, path, capture_output=False, stdout=subprocess.PIPE, stderr=write)
        finally:
            os.close(write)
        assert (done.returncode, done.stdout) == (3, "done\n")


class TestReports:
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ("sys.modules['html'] = None", "there is no report: ModuleNotFoundError"),
            (
                "import numpy, warnings\nnumpy.seterr(all='raise')\ntorch.set_default_device('meta')\n"
                "warnings.simplefilter('error')\n"
                "sys.stderr = type('Logger', (), {'write': lambda *_: 0, 'flush': lambda *_: None})()",
                "waiting for data",
            ),
        ],
        ids=["fail", "are told whatever a script has set"],
    )
    def test_that_fail_are_one_line_and_the_status_stands(self, script, change, said):
        done = python(*WATCH, script(f"{TRAINING}\n{change}\nprint('saved')\nsys.exit(3)\n"))
        assert (done.returncode, done.stdout) == (3, "saved\n"), done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr

    def test_are_written_where_watch_was_started_and_tell_of_make_loader(self, tmp_path, script, photo_set):
        path = script(f"""import os, threading
os.mkdir("elsewhere")
os.chdir("elsewhere")
{TRAINING}
import labkit as lk

def make(num_workers):
    data = lk.ImageDataset(lk.FolderStore(sys.argv[1]), transform=lambda image: image[:, :8, :8])
    return lk.make_loader(data, lk.LoaderConfig(batch_size=2, num_workers=num_workers))

train(make(0))
batches = iter(make(2))  # early versions of Python 3.12 start no worker any more when the script has come to its end
threading.Thread(target=train, args=(batches,)).start()  # Python waits for it
""")
        done = python(*WATCH, "--json", "found.json", path, photo_set, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        rows = json.loads((tmp_path / "found.json").read_text())["loaders"]
        assert [(row["num_workers"], row["n_batches"]) for row in rows] == [(0, 30), (0, 12), (2, 12)]
        assert all(row["role"].startswith("training") for row in rows)

    @pytest.mark.parametrize(("loop", "options"), [
        (FIRST, ["--replay"]),
        *(pytest.param(loop, ["--steps", "12", "--end"], marks=pytest.mark.exhaustive) for loop in REST),
    ])  # fmt: skip
    def test_without_steps_between_batches_still_end_before_they_save(self, script, loop, options):
        path = script(f"{UNSTEPPED}\n{LOOPS[loop]}\nopen('model', 'w').write('new')")
        (model := path.parent / "model").write_text("old")
        done = python(*WATCH, *options, path, cwd=path.parent)
        assert (done.returncode, model.read_text()) == (0, "old"), done.stderr
        said = {True: "where it would save by torch.save", False: "The batches of DataLoader 0 were taken for the"}
        assert "backward" in LOOPS[loop] or said["saves" in loop] in done.stderr

    @pytest.mark.exhaustive
    def test_tell_of_processes_that_a_script_starts(self, tmp_path, script):
        """Forked and spawned, with workers of their own; one ends by an error. The slowest has the figures."""
        path = script(f"""
            import multiprocessing as mp
            {textwrap.indent(TRAINING.rpartition("train(")[0], "            ").strip()}

            def work(rank, num_workers):
                train(DataLoader(TensorDataset(torch.zeros(60, 4)), 2, num_workers=num_workers))
                sys.exit(rank)

            if __name__ == "__main__":
                processes = [mp.get_context(("fork", "spawn")[n]).Process(target=work, args=(n, n)) for n in range(2)]
                for process in processes:
                    process.start()
                for process in processes:
                    process.join()
                print([process.exitcode for process in processes], [sorted(vars(process)) for process in processes])
        """)
        plain, watched = python(path), python(*WATCH, "--json", tmp_path / "found", path)
        assert (watched.returncode, watched.stdout) == (plain.returncode, plain.stdout), watched.stderr
        assert watched.stdout.startswith("[0, 1]")
        found = json.loads((tmp_path / "found").read_text())
        assert {row["process"] for row in found["ranks"]} == {"ForkProcess-1", "SpawnProcess-2"}
        assert found["shares"]["compute"] == pytest.approx(min(row["compute"] for row in found["ranks"]), rel=1e-6)
        assert "which the script started; of its 2 processes this one waits longest" in found["notes"][-1]


@pytest.mark.exhaustive
class TestTrainings:
    """Each starts processes that import torch."""

    @pytest.mark.parametrize(
        ("how", "num_workers", "status", "said"),
        [
            ("exits", 0, 7, "no torch.utils.data.DataLoader"), ("raises", 0, 1, "KeyError: 'photo 120'"),
            # torch itself says either, by whether the worker dies while its batch is fetched
            ("worker dies", 1, 1, "killed|Connection reset by peer"),
            ("interrupted", 0, -signal.SIGINT, "KeyboardInterrupt"),
            ("terminated", 0, -signal.SIGTERM, ""),
        ],
    )  # fmt: skip
    def test_have_a_report_however_they_end(self, how, num_workers, status, said):
        plain, watched = python(TRAINS, how, num_workers), python(*WATCH, TRAINS, how, num_workers)
        assert watched.returncode == plain.returncode == status
        assert watched.stdout == plain.stdout
        assert re.search(said, watched.stderr)
        assert (REPORTED in watched.stderr) == (how != "exits")
        assert "in watch_script" not in watched.stderr, "frames of labkit's own hide the script's"

    @pytest.mark.parametrize("options", [["--replay", "--steps", "12"], ["--steps", "12", "--end"]])
    def test_that_are_ended_save_nothing(self, tmp_path, options):
        done = python(*WATCH, *options, "--json", tmp_path / "found", TRAINS, "trains", 1, tmp_path / "model")
        assert done.returncode == 0, done.stderr
        assert not (tmp_path / "model").exists()
        found = json.loads((tmp_path / "found").read_text())
        assert found["ceiling_is_bound"] == ("--replay" not in options)
        assert (found["loader_s"] or 0) == pytest.approx(0.0043 if "--replay" in options else 0, rel=0.5)
        assert ("this run is no training" in done.stderr) == ("--replay" in options)

    def test_with_too_short_an_epoch_say_how_long_it_must_be_to_replay(self, script):
        short = TRAINING.replace("zeros(60, 4)", "zeros(24, 4)")
        done = python(*WATCH, "--replay", script(f"{short}\nopen('model', 'w')"))
        assert (done.returncode, done.stdout) == (0, "")
        assert not (script("").parent / "model").exists()
        assert "the first epoch, whose 12 batches are too few for it: 48 are enough" in " ".join(done.stderr.split())

    def test_that_refuse_their_arguments_say_so_alone(self, script):
        refuses = script("import argparse; argparse.ArgumentParser().parse_args()")
        done = python(*WATCH, refuses, "--batchsize", "3")
        assert (done.returncode, done.stderr) == (2, python(refuses, "--batchsize", "3").stderr)

    def test_have_their_own_options_after_their_name(self):
        done = python(*WATCH, "--epochs", "1", TRAINS, "trains", 1)
        assert done.returncode == 2
        assert "watch: no option --epochs: write those of the script after" in " ".join(done.stderr.split())

    def test_of_a_module_go_on_after_their_report_and_files(self, tmp_path):
        files = {name: tmp_path / f"found.{name}" for name in ("json", "html")}
        options = [word for name, path in files.items() for word in (f"--{name}", path)]
        module = "tests.watching.training_script"
        done = python(*WATCH, *options, "--steps", "20", "-m", module, "trains", "0", cwd=REPO)
        assert done.returncode == 0
        assert "1 59 " in done.stdout  # it went on after its report
        assert "waiting for data" in files["html"].read_text()
        found = json.loads(files["json"].read_text())
        assert found["command"] == f"-m {module} trains 0"
        assert sum(found["shares"].values()) == pytest.approx(1)
        assert found["ceiling_is_bound"]
        assert found["ceiling_low"] <= found["ceiling"] <= found["ceiling_high"]
        assert {"rung", "action", "speedup"} <= set(found["recommendation"])

    def test_in_ranks_report_once(self, tmp_path):
        ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--log-dir", tmp_path / "logs")
        done = python(*ranks, *WATCH, "--json", tmp_path / "found", TRAINS, "trains", 0)
        assert (done.returncode, done.stderr.count(REPORTED)) == (0, 1), done.stderr
        found = json.loads((tmp_path / "found").read_text())
        assert [row["rank"] for row in found["ranks"]] == [0, 1]
        assert found["shares"]["compute"] == pytest.approx(min(row["compute"] for row in found["ranks"]), rel=1e-6)
