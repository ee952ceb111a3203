"""What learners build in 03, 03b and 03c: each classic mistake is told by its name."""

import importlib
import os
import re
import sys
import textwrap
import types

import nbformat
import pytest

from labkit import course
from tests.paths import REPO


def folded_answer(stem, number):
    cells = nbformat.read(REPO / "notebooks" / f"{stem}.ipynb", as_version=4).cells
    task = next(cell.source for cell in cells if cell.source.startswith(f"**{number}**"))
    return re.search(r"<summary>Answer</summary>\n\n```python\n(.*)\n```", task, re.DOTALL)[1]


CORES = folded_answer("03_persistent_workers", "03.1")
DRAWS = folded_answer("03b_seeds", "03b.1")


def changed(text, *pairs):
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def said_of_cores(code, capsys):
    space = {"os": os}
    exec(code, space)  # noqa: S102
    course.check(space["usable_cores"], course.cores_of_a_process)
    return capsys.readouterr().out


class TestCores:
    @pytest.mark.parametrize(
        ("old", "new", "told"),
        [
            ("len(affinity)", "os.cpu_count()", "os.cpu_count() counts CPUs that the process may not use"),
            ('"max", "-1"', '"-1"', "`max` in version 2"),
            ('"max", "-1"', '"max"', "-1 in version 1 are no quota"),
            ('["cpu.max"]', '["no.file"]', "a quota in `cpu.max` limits the process, too"),
            ('"cpu.cfs_quota_us"', '"no.file"', "cgroup v1 has its quota in `cpu.cfs_quota_us`"),
            ("int(quota) // int(period)", "-(-int(quota) // int(period))", "gave 3, and 2 is right"),
            ("int(quota) // int(period)", "int(quota) // 100000", "this period is another one"),
            ("cores = min(cores, int(quota) // int(period))", "cores = int(quota) // int(period)", "affinity limits"),
            ("max(1, cores // n_ranks)", "cores // n_ranks", "no rank to 0"),
            ("cores // n_ranks", "cores", "ranks share what the quota leaves"),
            ("cores // n_ranks", "round(cores / n_ranks)", "gave 2, and 1 is right"),
            ("int(quota) // int(period)", "round(int(quota) / int(period))", "gave 4, and 3 is right"),
            ("max(1, cores // n_ranks)", "max(1, cores / n_ranks)", "gave 5.0, and 5 is right"),
        ],
    )
    def test_a_classic_mistake_is_told(self, capsys, old, new, told):
        said = said_of_cores(changed(CORES, (old, new)), capsys)
        assert said.startswith("not yet: ")
        assert told in said


@pytest.fixture
def said_of_draws(tmp_path, monkeypatch, capsys, request):
    """What the check says of a module's code, with a name of its own so that no older one is imported."""

    def said(code):
        name = "draws_" + re.sub(r"\W", "_", request.node.name)
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        course.check(importlib.import_module(name).Draws, course.draws_of_a_sample)
        return capsys.readouterr().out

    return said


def with_draw(code):
    """The folded answer with another body of `__getitem__`."""
    start = DRAWS.index("        own = ")
    return DRAWS[:start] + textwrap.indent(textwrap.dedent(code).strip(), " " * 8)


EPOCH = "torch.zeros((), dtype=torch.long).share_memory_()"
LAZY = """
    worker = torch.utils.data.get_worker_info()
    if getattr(self, "drawn_in", None) != int(self.epoch):
        self.drawn_in = int(self.epoch)
        self.own = np.random.default_rng([self.seed, int(self.epoch), worker.id if worker else 0])
    return torch.from_numpy(self.own.random(3))
"""
WRONG = {
    "manual_seed": (
        with_draw("torch.manual_seed(hash((self.seed, int(self.epoch), index)))\nreturn torch.rand(3)"),
        "the training's own generators changed",
    ),
    "global draw": (with_draw("return torch.rand(3)"), "the training's own generators changed"),
    "no epoch": (changed(DRAWS, (", int(self.epoch), ", ", ")), "each sample draws in epoch 1 what it drew in epoch 0"),
    "no index": (changed(DRAWS, (", index]", "]")), "two samples of an epoch"),
    "sum": (
        changed(DRAWS, ("[self.seed, int(self.epoch), index]", "self.seed + int(self.epoch) + index")),
        "of neighboring epochs or of runs with neighboring seeds draw the same",
    ),
    "seed and epoch added": (
        changed(DRAWS, ("self.seed, int(self.epoch), index", "self.seed + int(self.epoch), index")),
        "of runs with neighboring seeds draw the same, as with seed + epoch",
    ),
    "one number": (changed(DRAWS, ("own.random(3)", "own.random(1)")), "draw three numbers"),
    "not shared": (
        changed(DRAWS, (".share_memory_()", "")),
        "kept workers, started by fork, draw in epoch 1 as in epoch 0",
    ),
    "worker id": (with_draw(LAZY), "with num_workers=2, samples draw otherwise than without workers"),
    "attribute": (
        changed(DRAWS, (EPOCH, "0"), ("self.epoch.fill_(epoch)", "self.epoch = epoch")),
        "changes in the training process alone",
    ),
    "global epoch": (
        changed(
            DRAWS,
            ("class Draws", "EPOCH = 0\n\nclass Draws"),
            ("self.epoch.fill_(epoch)", "global EPOCH\n        EPOCH = epoch"),
            ("int(self.epoch)", "EPOCH"),
        ),
        "changes in the training process alone",
    ),
}


class TestDraws:
    def test_global_generators_that_get_their_states_back_are_right(self, said_of_draws):
        restored = """
            old = torch.get_rng_state()
            seeds = np.random.SeedSequence([self.seed, int(self.epoch), index]).generate_state(1)
            torch.default_generator.manual_seed(int(seeds[0]))
            try:
                return torch.rand(3)
            finally:
                torch.set_rng_state(old)
        """
        assert said_of_draws(with_draw(restored)) == "right\n"

    @pytest.mark.parametrize("mistake", WRONG)
    def test_a_classic_mistake_is_told(self, said_of_draws, mistake):
        code, told = WRONG[mistake]
        said = said_of_draws(code)
        assert said.startswith("not yet: ")
        assert told in said


NAMES = folded_answer("03c_worker_memory", "03c.1")
AS_A_WHOLE = """
class Names:
    def __init__(self, names):
        self.held = {held}

    def __getitem__(self, number):
        return self.held[number]
"""
ENCODED = "[os.fsencode(name) for name in names]"
BYTES = "self.block[start:end].numpy().tobytes()"
DECODED = f"os.fsdecode({BYTES})"
WRONG_NAMES = {
    "list": (AS_A_WHOLE.format(held="names"), "a list of 3,008 objects: reading one changes its reference count"),
    "tuple": (AS_A_WHOLE.format(held="tuple(names)"), "a tuple of 3,008 objects"),
    "deque": (
        AS_A_WHOLE.format(held="__import__('collections').deque(names)"),
        "Python objects, each with a reference count",
    ),
    "array of str": (AS_A_WHOLE.format(held="np.array(names)"), "an array with an element for each name"),
    "array of objects": (AS_A_WHOLE.format(held="np.array(names, object)"), "an array with an element for each name"),
    "list of bytes": (
        changed(AS_A_WHOLE.format(held=ENCODED), ("self.held[number]", "os.fsdecode(self.held[number])")),
        "a list of 3,008 objects",
    ),
    "kept beside": (
        changed(NAMES, ("        encoded =", "        self.names = names\n        encoded =")),
        "a list of 3",
    ),
    "UTF-8 alone": (changed(NAMES, ("os.fsencode(name)", "name.encode()")), "names of files may be any bytes"),
    "replaced": (changed(NAMES, ("os.fsencode(name)", 'name.encode(errors="replace")')), "os.fsencode and os.fsdecode"),
    "characters": (changed(NAMES, ("len, encoded", "len, names")), "`é` is one character, and two bytes"),
    "bytes": (changed(NAMES, (DECODED, BYTES)), "names are strings"),
    "a local class": (
        "def Names(names):\n    class Inner:\n        def __getitem__(self, number):\n"
        "            return PACKED[number]\n    global PACKED\n    PACKED = Packed(names)\n    return Inner()\n"
        + changed(NAMES, ("class Names", "class Packed")),
        "a spawned worker gets it by pickle",
    ),
}


@pytest.fixture
def said_of_names(monkeypatch, capsys):
    def said(code):
        module = types.ModuleType("learned_names")  # classes of a notebook are pickled by the name of their module
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(f"import os, numpy as np\n{code}", vars(module))  # noqa: S102
        course.check(module.Names, course.shared_names)
        return capsys.readouterr().out

    return said


class TestNames:
    def test_what_the_notebook_says_to_paste_is_right(self, said_of_names):
        cell = nbformat.read(REPO / "notebooks" / "03c_worker_memory.ipynb", as_version=4).cells[0].source
        pasted = re.search(r"```python\n(.*?)\n```", cell, re.DOTALL)[1].partition('\nif __name__ == "__main__":')[0]
        assert said_of_names(changed(pasted, ("class PackedNames", "class Names"))) == "right\n"

    def test_strings_that_labkit_packs_are_right(self, said_of_names):
        assert said_of_names("import labkit as lk\nNames = lk.PackedStrings") == "right\n"

    @pytest.mark.parametrize("mistake", WRONG_NAMES)
    def test_a_classic_mistake_is_told(self, said_of_names, mistake):
        code, told = WRONG_NAMES[mistake]
        said = said_of_names(code)
        assert said.startswith("not yet: ")
        assert told in said
