"""The rooms of the package: who may import what, how long a function may be, and where its tests are."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import labkit as lk
from tests.paths import REPO

PACKAGE = REPO / "labkit"


def _modules() -> dict[str, Path]:
    return {".".join(path.relative_to(REPO).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}


def test_folders_are_imported_from_their_init():
    """Modules outside a folder use only what its `__init__` hands on."""
    modules = _modules()
    violations = [
        f"{path.relative_to(REPO)}:{node.lineno} imports {node.module}: import it from its folder"
        for name, path in modules.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module in modules
        if not name.startswith(node.module.rpartition(".")[0] + ".")
    ]
    assert violations == []


@pytest.mark.parametrize("command", ["lint-imports", "lizard -C 10 -L 50 -w labkit data_scripts"])
def test_linters_find_nothing(command):
    """Imports run one way, and functions have at most 50 lines and a cyclomatic complexity of at most 10."""
    program, *arguments = command.split()
    path = Path(sys.executable).with_name(program)
    done = subprocess.run([path, *arguments], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


CONTRIBUTING = (REPO / ".github" / "CONTRIBUTING.md").read_text()
_EXAMPLES = {"labkit/a/b.py", "tests/a/test_b.py", "tests/data/stores/test_", "notebooks/NN_name.ipynb"}


def test_contributing_names_what_is_there():
    """Its paths exist, its picture has every room, and its linters are those of `.ci/run`."""
    paths = set(re.findall(r"(?:labkit|tests|notebooks|data_scripts|\.github|\.ci)/[\w./]*", CONTRIBUTING)) - _EXAMPLES
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not (REPO / path).exists()] == []
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert set(re.findall(r"\b(\w+)/(?= {2,})", CONTRIBUTING)) == rooms
    linters = re.search(r"    (ruff check .*)", CONTRIBUTING)[1].split(" && ")
    assert set(linters) <= set((REPO / ".ci" / "run").read_text().splitlines())


def test_every_name_is_there_and_lists_itself():
    assert set(lk.__all__) <= set(dir(lk))
    assert [name for name in lk.__all__ if getattr(lk, name) is None] == []


# Tests of the repository or of several modules at once, not of one module.
WITHOUT_MODULE = {
    "test_house": "the package as a whole",
    "test_notebook_prose": "the prose of notebooks/, with notebook_prose.py",
    "test_sentence_lengths": "the prose of notebooks/, with sentence_lengths.py",
    "test_stored_notebooks": "the folder notebooks/",
    "test_readme": "README.md and the pages of the site, with pages.py",
    "test_wheel": "the distribution: its name, and what a wheel holds",
    "test_typing": "the types of all public names",
    "data/test_scaling": "all that decodes JPEGs at a reduced size",
    "peers/adapters/test_native": "all adapters, which obey the same rules",
}

# Test file -> further modules that it covers: parts of its module, or helpers that work only through it.
COVERS = {
    "core/mapping/test_engines": "core/mapping/pools core/mapping/ray core/progress",
    "data/depth/test_pairs": "data/depth/fast data/depth/presets data/depth/reference",
    "data/extract/test_extract": "data/extract/files data/extract/plan data/extract/tree",
    "data/pixels/test_store": "data/pixels/format data/pixels/mapped data/pixels/parts",
    "data/shards/test_dataset": "data/shards/orders data/shards/place data/shards/progress",
    "data/shards/test_read": (
        "data/shards/layout data/shards/listing data/shards/plan data/shards/sample data/shards/shuffling"
    ),
    "data/sizes/test_collect": "data/sizes/folders data/sizes/sd_metadata",
    "data/stores/test_base": "core/names",
    "data/tar/test_index": "data/tar/compressions data/tar/errors data/tar/members",
    "data/test_decoders": "teach/conformance teach/conformance_plots",
    "hardening/test_bombs": "core/limits",
    "hardening/test_credentials": "core/credentials",
    "hardening/test_locale_home": "core/stdio",
    "lab/site/javascript/test_translation": (
        "lab/site/javascript/calls lab/site/javascript/expressions lab/site/javascript/functions"
    ),
    "lab/site/test_building": "lab/site/command lab/site/settings",
    "measure/test_timing": "measure/processes measure/recording measure/runs measure/sampler",
    "peers/adapters/test_native": (
        "peers/adapters/albumentations peers/adapters/dali peers/adapters/datago peers/adapters/datasets "
        "peers/adapters/ffcv peers/adapters/grain peers/adapters/litdata peers/adapters/own peers/adapters/reduced "
        "peers/adapters/spdl peers/adapters/streaming peers/adapters/timm peers/adapters/torchcodec "
        "peers/adapters/torchdata peers/adapters/torchvision peers/adapters/turboloader peers/adapters/webdataset"
    ),
    "peers/test_registry": (
        "peers/check peers/host peers/peer peers/plots peers/probe_images peers/report peers/serve peers/table"
    ),
    "pipeline/batch_loader/test_loader": "pipeline/batch_loader/buffers pipeline/batch_loader/fillers",
    "pipeline/simulation/test_context": (
        "pipeline/simulation/device pipeline/simulation/dispatch pipeline/simulation/operations "
        "pipeline/simulation/pinned pipeline/simulation/simulation pipeline/simulation/streams "
        "pipeline/simulation/tensor pipeline/simulation/transfers"
    ),
    "pipeline/test_augment": "pipeline/agreement",
    "teach/claims/test_judging": ("teach/claims/ledger teach/claims/plots teach/claims/text teach/claims/trials"),
    "teach/reference/test_record": "teach/reference/experiments teach/reference/fast_path",
    "teach/test_start": "teach/start_picture teach/start_tree",
    "teach/test_exercises": (
        "teach/checks/conclusions teach/checks/loading teach/checks/measuring teach/checks/storage"
    ),
    "tuning/plan/test_ceilings": "tuning/plan/line tuning/plan/setup",
    "tuning/plan/test_planning": "tuning/plan/inputs tuning/plan/seen",
    "tuning/plan/test_result": "tuning/plan/page",
    "tuning/test_stalls": "tuning/training_loop",
    "tuning/watch/test_program": (
        "tuning/watch/ending tuning/watch/ranks tuning/watch/report tuning/watch/script tuning/watch/settings "
        "tuning/watch/terminal tuning/watch/trial"
    ),
    "tuning/watch/test_session": "tuning/watch/accounts tuning/watch/fetching tuning/watch/observing",
}


def test_tests_mirror_the_package():
    """`labkit/a/b.py` is tested in `tests/a/test_b.py`, unless the lists above say otherwise."""
    tests = {path.relative_to(REPO / "tests") for path in (REPO / "tests").rglob("test_*.py")}
    tests = {path.with_suffix("").as_posix() for path in tests if path.parts[0] != "hardening"}
    modules = {path.relative_to(PACKAGE) for path in _modules().values() if _defines_something(path)}
    own_tests = {module.with_name(f"test_{module.stem}").as_posix(): module for module in modules}
    covered = {Path(f"{name}.py") for names in COVERS.values() for name in names.split()}
    assert tests - set(own_tests) == set(WITHOUT_MODULE)
    assert [name for name in COVERS if not (REPO / "tests" / f"{name}.py").is_file()] == []
    assert {module for test, module in own_tests.items() if test not in tests} == covered


def _defines_something(path: Path) -> bool:
    definitions = (ast.FunctionDef, ast.ClassDef)
    return path.stem != "__init__" and any(isinstance(node, definitions) for node in ast.parse(path.read_text()).body)
