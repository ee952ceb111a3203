"""README.md and the pages: their links lead somewhere, and every command and snippet of them runs."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib

import pytest
from torch.utils.data import DataLoader

import labkit as lk
from labkit import course
from labkit.app.cli import COMMANDS, main, parse
from labkit.app.notebooks import find_notebooks
from labkit.data import tiles
from labkit.util.machine import DISTRIBUTION
from tests.pages import PAGES, README, SYMPTOM_INDEX, SYMPTOMS, TEXTS, blocks, commands
from tests.paths import REPO, SCRIPTS, invoke, run_script
from tests.timing import leave_memory_out

EVERY = [(name, command) for name, path in TEXTS.items() for command in commands(path)]
LINKED = TEXTS | SYMPTOMS | {"symptoms": SYMPTOM_INDEX}
OWN_TESTS = ("README", "recipes", "trainers")
NAMES = set(COMMANDS)
PLACES = {"FOLDER": "made", "SOURCE": "photos", "FILE": "made.pixels", "TABLE": "sizes.csv", "COUNT": "2"}
[TRAIN] = [block.text for block in blocks(TEXTS["faster_loaders"], "python") if "# train.py" in block.text]
OF_TORCH = """torch.utils.data.DataLoader(
    lk.ImageDataset(store, transform=lk.make_augment("light", "v2", part="geometry")), batch_size=2)"""


class TestText:
    def test_the_two_commands_are_those_of_ci(self):
        [first] = [block for block in blocks(README, "") if "[test]" in block.text]
        assert first.text.splitlines() == [
            'python -m pip install -e ".[test]" && python -m labkit tour', "python -m pytest",
        ]  # fmt: skip
        run = (REPO / ".ci" / "run").read_text()
        lines = [line.partition("#")[0].strip().replace("install -q", "install") for line in run.splitlines()]
        assert 'PIP_NO_COMPILE=1 python -m pip install -e ".[test]"' in lines
        assert "python -m pytest" in lines

    @pytest.mark.parametrize("name", LINKED)
    def test_its_links_lead_somewhere(self, name):
        """A page's notebooks lie beside the folder of pages, where the site puts them."""
        path = LINKED[name]
        for link in re.findall(r"\]\(((?!https?:)[^)#]+)", path.read_text()):
            target = REPO / link.removeprefix("../") if link.startswith("../notebooks/") else path.parent / link
            assert target.exists(), link

    def test_the_readme_leads_to_every_page_and_notebook(self):
        text = README.read_text()
        assert [path.name for path in PAGES if f"notebooks/guide/{path.name})" not in text] == []
        rows = re.findall(r"^\| \[[^\]]+\]\(notebooks/(\w+)\.ipynb\) \| .+ \|$", text, re.MULTILINE)
        assert rows == [notebook.name for notebook in find_notebooks()]

    def test_the_readme_is_short_and_its_answers_stand_alone(self):
        """A reader of the table sees neither the question nor what comes after the sentence."""
        text = README.read_text()
        assert len(re.findall(r"(?<!\S)[^\s\w]*\w\S*", text)) <= 700
        answers = re.findall(r"^\| \[[^\]]+\]\(notebooks/\w+\.ipynb\) \| (.+) \|$", text, re.MULTILINE)
        assert [one for one in answers if len(one.split()) > 20] == []
        assert [one for one in answers if re.match("(yes|no|if|it|that|this|they)\\b", one, re.IGNORECASE)] == []


@pytest.fixture
def place(tmp_path, photo_set, monkeypatch):
    """A scratch folder with the lab's photos in `photos`, and those of one class in `val`; the current folder."""
    shutil.copytree(photo_set, tmp_path / "photos", copy_function=os.link, ignore=shutil.ignore_patterns("*.json"))
    last_class = max((tmp_path / "photos").iterdir())
    shutil.copytree(last_class, tmp_path / "val" / last_class.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LABKIT_SCALE", "ci")
    leave_memory_out(monkeypatch)
    return tmp_path


def run_here(command):
    """Run a command in a process of its own, in the current folder; what it says on stderr."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), "."])}
    words = [sys.executable, *shlex.split(command)[1:]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=environment)
    is_over = "--budget" in command and "over the budget" in done.stderr  # other programs
    assert done.returncode == (3 if is_over else 0), done.stderr + done.stdout
    return done.stderr


def is_installable(arguments):
    """Whether what is asked of pip is this project, with extras that it has."""
    if arguments[0] == "wheel":
        return arguments[1:] == ["--no-deps", "."]
    [asked] = [one for one in arguments[1:] if not one.startswith("-")]
    name, _, chosen = asked.partition("[")
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    is_ours = name in {".", "/path/to/clone", DISTRIBUTION, "labkit_images-*.whl"}
    return is_ours and set(filter(None, chosen.rstrip("]").split(","))) <= set(extras)


def has_markers(arguments):
    markers = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    return arguments == [] or (arguments[0] == "-m" and any(one.startswith(arguments[1]) for one in markers))


class TestCommands:
    """A command is parsed with the options it has here; scripts are run below, and the rest in tests/app."""

    def test_a_wrong_option_would_be_found(self, capsys):
        with pytest.raises(SystemExit):
            parse(["tour", "--sizes", "gpu"])
        assert capsys.readouterr().err == "labkit: unrecognized arguments: --sizes gpu\n"

    @pytest.mark.parametrize(("name", "command"), EVERY)
    def test_it_is_one_that_there_is(self, name, command):
        program, *arguments = shlex.split(command)
        assert program == "python"
        if arguments[0].startswith("data_scripts/"):
            script = runpy.run_path(str(REPO / arguments[0]))["main"]
            script.parser.parse_intermixed_args([PLACES.get(one, "x.tar") for one in arguments[1:]])
        elif arguments[:2] == ["-m", "labkit"]:
            assert arguments[2] in NAMES
            if len(arguments) > 3 or arguments[2] not in ("watch", "diagnose"):  # their name alone is no command
                parse(arguments[2:])
        else:
            assert {"pip": is_installable, "pytest": has_markers}[arguments[1]](arguments[2:])

    def test_every_script_makes_what_the_page_says(self, place):
        lines = [command for command in commands(TEXTS["reference"]) if "data_scripts/" in command]
        assert {line.split()[1].partition("/")[2] for line in lines} == {path.name for path in SCRIPTS.glob("*.py")}
        with tarfile.open("x.tar", "w") as tar:
            tar.add(place / "photos", "photos")
        for number, line in enumerate(one for one in lines if "download" not in one):
            script, *arguments = line.split()[1:]
            given = [f"made{number}" if one == "FOLDER" else PLACES.get(one, "x.tar") for one in arguments]
            given = ["photos", "sizes.csv"] if "collect_sizes" in script else given
            result = run_script(script.partition("/")[2].removesuffix(".py"), *given)
            assert result.exit_code == 0, result.output

    @pytest.mark.exhaustive
    def test_diagnose_finds_the_training_of_the_page_on_plans(self, place, monkeypatch):
        monkeypatch.setattr("sys.path", [*sys.path])
        monkeypatch.setattr("sys.argv", [*sys.argv])
        [training] = [
            block.text for block in blocks(TEXTS["compare_and_plan"], "python") if "def make_training" in block.text
        ]
        (place / "train.py").write_text(training)
        [name] = [
            command.split()[-1] for command in commands(TEXTS["compare_and_plan"]) if "labkit diagnose" in command
        ]
        result = invoke(main, ["diagnose", name, "--batches", "2", "--rounds", "1", "--limit", "1"])
        sys.modules.pop("train", None)
        assert result.exit_code == 0, result.output
        assert re.search(r"^  waiting for data  \d+% of the run", result.output, re.M)

    @pytest.mark.exhaustive
    def test_watch_reports_on_the_script_of_the_readme(self, place):
        [command] = [one for one in commands(README) if "watch train.py" in one]
        (place / "train.py").write_text(TRAIN)
        assert "labkit watch" in run_here(command)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("command", [one for one in commands(TEXTS["start"]) if "labkit watch -" in one])
    def test_watch_with_options(self, place, command):
        script = TRAIN.replace("lk.BatchLoader(store, size=224, batch_size=64)", OF_TORCH)
        (place / "package").mkdir()
        for name in ("train.py", "package/train.py"):
            (place / name).write_text(script)
        run_here(command)


class TestSnippets:
    @pytest.fixture
    def storages(self, place, monkeypatch):
        """For the page on storage: tars, a list of depth pairs, and an S3 server that `s3://` leads to."""
        pytest.importorskip("s3fs", reason='s3fs is not installed: python -m pip install -e ".[s3]"')
        s3fs = pytest.importorskip("s3fs")
        if not shutil.which("jpegtran"):  # without it photos are copied as they are
            monkeypatch.setattr(tiles, "_transform", lambda: lambda data, restart_interval: data)
        s3fs.S3FileSystem.clear_instance_cache()  # clients of earlier tests, whose server has gone
        with tarfile.open("photos.tar", "w") as tar:
            tar.add("photos", ".")
        made = course.make_depth(place / "depth", 1, tar=True, progress=False)
        (made / "train.tar").rename("hypersim.tar")
        (made / "filename_list_train.txt").rename("train.txt")
        lk.write_shards(lk.FolderStore("photos"), "bucket/shards", progress=False)
        (place / "photos").rename("bucket/photos")
        (place / "photos").symlink_to("bucket/photos")
        with course.serve_s3({"bucket": place / "bucket"}) as options:
            monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
            yield

    @pytest.mark.exhaustive
    @pytest.mark.parametrize(
        "name", [name for name in TEXTS if name not in OWN_TESTS and blocks(TEXTS[name], "python")]
    )
    def test_the_blocks_of_a_page_run_in_their_order(self, name, place, request):
        if name == "storage":
            request.getfixturevalue("storages")
        names = {"__name__": "__main__"}
        for block in blocks(TEXTS[name], "python"):
            code = compile("\n" * (block.line - 1) + block.text, f"{name}.md", "exec")
            exec(code, names)  # noqa: S102 - our own text
        assert "lk" in names

    def test_the_lines_of_the_readme_replay_a_few_batches_for_an_epoch(self):
        [block] = blocks(README, "python")
        names = {"loader": DataLoader(range(20))}  # the reader's own
        exec(block.text, names)  # noqa: S102 - our own text
        assert [int(batch) for batch in names["loader"]] == [*range(8), *range(8), *range(4)]
