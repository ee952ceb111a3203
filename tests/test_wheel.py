"""The distribution: its name, which is not the module's, and a wheel that is complete without the clone."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from itertools import chain

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import labkit as lk
from labkit.util.machine import DISTRIBUTION, IS_CLONE
from tests.paths import REPO, contents

TAKEN = "labkit"  # on the package index, another project's
NAMES_IT = re.compile(rf"""(?<![\w/.-]){TAKEN}\[|pip install (?:-\S+ )*["']?{TAKEN}(?![\w-])""")


def test_our_own_name_is_the_only_one_that_requirements_and_texts_use():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    requirements = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    assert TAKEN not in {canonicalize_name(Requirement(each).name) for each in requirements}
    folders = [REPO / name for name in ("labkit", "data_scripts", "notebooks", "tests", ".ci", ".github")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    texts = {path: path.read_text(errors="replace") for path in [REPO / "README.md", REPO / "pyproject.toml", *files]}
    assert NAMES_IT.search(f'pip install "{TAKEN}[fast]"')
    assert [str(path) for path, text in texts.items() if NAMES_IT.search(text)] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason='hatchling is not installed: python -m pip install -e ".[test]"')
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [path] = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def python(wheel, tmp_path):
    """Runs Python with the wheel in an empty folder."""
    unchanged = {"PYTHONPATH": str(wheel), "PYTHONDONTWRITEBYTECODE": "1"}  # whichever test comes first
    place = {**os.environ, **unchanged, "LABKIT_SCALE": "ci"}

    def run(*arguments):
        return subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=place, capture_output=True, text=True)

    return run


def test_it_holds_what_the_clone_does(wheel):
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a clone: git does not know these files")
    places = {"labkit": "labkit", "notebooks": "labkit/course/notebooks", "data_scripts": "labkit/course/data_scripts"}
    tracked = [name.partition("/") for name in listed.stdout.split("\0") if (REPO / name).is_file()]
    expected = {f"{places[top]}/{rest}": (REPO / top / rest).read_bytes() for top, _, rest in tracked if top in places}
    held = contents(wheel)
    assert {name: held.get(name) == data for name, data in expected.items()} == dict.fromkeys(expected, True)
    assert not [name for name in held if "__pycache__" in name or "checkpoint" in name]
    [about] = (Parser().parsestr(data.decode()) for name, data in held.items() if name.endswith("/METADATA"))
    assert about["Name"] == DISTRIBUTION
    assert TAKEN not in {canonicalize_name(Requirement(each).name) for each in about.get_all("Requires-Dist")}


def test_it_lists_its_notebooks_and_names_its_extras_without_the_clone(wheel, python, tmp_path):
    assert IS_CLONE
    done = python("-m", "labkit", "list")
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == [path.stem for path in sorted((REPO / "notebooks").glob("*.ipynb"))], done.stderr
    code = "import labkit.util.machine as c; print(c.IS_CLONE, c.NOTEBOOK_FOLDER, c.install_command('s3'))"
    says = f'False {wheel}/labkit/course/notebooks python -m pip install "{DISTRIBUTION}[s3]"'
    assert python("-c", code).stdout.strip() == says
    assert list(tmp_path.iterdir()) == []


def test_its_notebooks_are_copied_to_where_a_reader_is_and_its_scripts_run(python, tmp_path):
    done = python("-c", "from labkit.app.notebooks import update_copies; update_copies(print)")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "labkit-notebooks" / ".labkit-copies.json").read_text())
    assert set(record) == {name for name in contents(tmp_path / "labkit-notebooks") if not name.startswith(".")}
    script = tmp_path / "labkit-notebooks" / "data_scripts" / "make_photos.py"
    assert python(str(script), "photos", "2").returncode == 0
    assert len(lk.FolderStore(tmp_path / "photos")) == 2
