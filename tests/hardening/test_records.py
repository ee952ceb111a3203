"""The tables of recorded runs: how they are written, and that the page states their totals."""

import re
import tomllib
from collections import Counter, OrderedDict

import numpy as np
import pandas as pd
import psutil
import pytest

import labkit as lk
from tests.hardening import bias, bigger_than_memory, noise
from tests.hardening.faults.__main__ import summarize_rows
from tests.hardening.soak.subjects import PLANTED, SUBJECTS
from tests.hardening.tables import RECORDS, update_table
from tests.paths import REPO

PAGE = (RECORDS / "README.md").read_text()


def load(name: str) -> pd.DataFrame:
    frame = pd.read_csv(RECORDS / f"{name}.csv")
    return frame.set_index(frame.columns[0])


def test_every_table_is_on_the_page():
    assert set(re.findall(r"\((\w+\.csv)\)", PAGE)) == {path.name for path in RECORDS.glob("*.csv")}


def test_the_page_states_the_totals_of_the_tables():
    faults, fuzz, mutation = load("faults").loc["all"], load("fuzz"), load("mutation")
    coverage = load("coverage").loc["all"]
    twins = pd.read_csv(RECORDS / "noise.csv").query("truth == 1").groupby("how")[["n", "n_wrong"]].sum()
    for words in (
        f"{faults['injected']} faults", f"{faults['violations']} violations", f"{faults['clear error']} clear errors",
        f"{fuzz['executions'].sum():,} inputs", f"{fuzz['findings'].sum()} findings",
        f"{mutation['mutants'].sum():,} mutants", f"{mutation['killed'].sum():,} killed",
        f"{coverage['lines_pct']} % of {coverage['lines']:,.0f} lines",
        f"{coverage['branches_pct']} % of {coverage['branches']:,.0f} branches",
        f"{twins.loc['real', 'n_wrong']} of {twins.loc['real', 'n']} were told apart",
        f"Of {twins.loc['replayed', 'n']:,} replays of their noise {twins.loc['replayed', 'n_wrong']} were",
    ):  # fmt: skip
        assert words in PAGE.replace("\n", " "), words


def test_the_pages_state_how_far_tours_agree():
    days = pd.read_csv(RECORDS / "days.csv")
    shares = (100 * days["overlapping"] / days["comparisons"]).round().astype(int)
    morning, [other] = (
        shares[days["read_from"] == "frames"],
        shares.index[days["rate_change"] == days["rate_change"].max()],
    )
    for page in (PAGE, (REPO / "labkit" / "lab" / "site" / "pages" / "reliability.md").read_text()):
        text = " ".join(page.split())
        n_least = days.loc[morning.index, "comparisons"].min()
        assert f"{morning.min()} to {morning.max()} % of {n_least} comparisons" in text
        assert re.search(rf"agree(d)? in {shares[other]} % of {days.loc[other, 'comparisons']}\.", text)


def test_no_run_had_a_forbidden_result_and_only_the_planted_leak_grows():
    faults, soak = load("faults"), load("soak")
    assert faults.loc["all", "injected"] >= 500
    assert not faults["violations"].any()
    assert set(soak.index) == set(SUBJECTS)
    assert set(soak.index[soak["written"].str.endswith("grows")]) == {PLANTED}
    assert soak["right"].all()
    assert load("load")["is_right"].all()


def test_new_rows_replace_those_of_the_same_name(tmp_path):
    path = tmp_path / "new" / "table.csv"
    update_table(path, [{"what": "a", "n": 1}, {"what": "b", "n": 2}])
    update_table(path, [{"what": "c", "n": 3}, {"what": "a", "n": 4}])
    assert path.read_text() == "what,n\na,4\nb,2\nc,3\n"


def test_faults_are_counted_by_kind():
    rows = [("server cut, once", "clear error", False), ("server 500, always", "right all the same", False),
            ("SIGINT fresh", "stopped", True)]  # fmt: skip
    table = summarize_rows([dict(zip(("fault", "outcome", "violated"), row, strict=True)) for row in rows])
    counts = table.set_index("fault")[["injected", "violations", "clear error", "right all the same"]].T.to_dict("list")
    assert counts == {"SIGINT": [1, 1, 0, 0], "server": [2, 0, 1, 1], "all": [3, 1, 1, 1]}
    assert list(table["fault"]) == ["SIGINT", "server", "all"]


def test_verdicts_are_counted_by_condition():
    where = {"how": "real", "loader": "threads", "beside": "nothing"}
    row, wrong = (where | noise.judge(np.array(ratios), 1, 1.0) for ratios in ([0.5, 2.0], [1.5, 1.51, 1.52]))
    [counts] = noise.summarize_rows(pd.DataFrame([row, wrong])).to_dict("records")
    assert (counts["n"], counts["n_wrong"], counts["found"], counts["covered"]) == (2, 1, 50, 50)
    assert counts["wrong_at_most"] == pytest.approx(97.47)


@pytest.mark.parametrize("truth", [1.0, 2.0])
def test_recorded_runs_are_replayed_as_twins_of_a_known_ratio(truth):
    rates = np.random.default_rng(0).normal(100, 0.1, 50)
    found = noise.replay(np.full(50, 0.1), rates, truth, np.random.default_rng(1))
    assert found["speedup"] == pytest.approx(truth, rel=0.01)
    assert (found["n_rounds"], found["wrong"]) == (lk.scale().rounds, False)


def test_only_a_busy_core_is_kept_busy_and_only_for_a_while():
    def n_children():
        return len(psutil.Process().children())

    before = n_children()
    for beside, n_hogs in {"nothing": 0, "a busy core": 1}.items():
        with noise.company(beside):
            assert n_children() == before + n_hogs
        assert n_children() == before


def test_a_bias_is_that_of_the_ratios_of_two_ways():
    tries = pd.DataFrame({"pair": "p", "watched": [2.0, 2.0, 2.0], "compared": [2.2, 2.19, 2.21]})
    [row] = bias.summarize_tries(tries).to_dict("records")
    assert row["bias"] == pytest.approx(10, abs=0.1)
    assert row["bias_low"] < row["bias"] < row["bias_high"]


def test_epochs_are_summed_up_by_way():
    way = {"what": "read", "format": "tar", "order": "random", "hint": "none", "workers": 1}
    epochs = [(1, 100.0, 20.0), (2, 300.0, 8.0), (1, 130.0, 22.0), (2, 200.0, 8.0), (1, 110.0, 30.0)]
    rows = [
        way | {"epoch": epoch, "images_per_s": rate, "mb_per_s": rate / 100, "asked_kb": 10.0, "read_kb": read_kb,
               "cached_mb": 5.0}
        for epoch, rate, read_kb in epochs
    ]  # fmt: skip
    first, second = bigger_than_memory.summarize_rows(pd.DataFrame(rows)).to_dict("records")
    assert (first["images_per_s"], first["slowest"], first["fastest"], first["rounds"]) == (110, 100, 130, 3)
    assert (first["read_per_asked"], second["read_per_asked"], second["images_per_s"]) == (2.2, 0.8, 250)


@pytest.mark.parametrize("cached", [0.1, 0.25, 0.9])
def test_hits_of_a_shuffled_epoch_are_those_of_a_cache_that_is_played_through(cached):
    count, generator = 20_000, np.random.default_rng(0)
    held, n_hits = OrderedDict.fromkeys(generator.permutation(count)[-int(cached * count) :]), 0
    for image in generator.permutation(count):
        n_hits += image in held
        held[image] = None
        held.move_to_end(image)
        if len(held) > cached * count:
            held.popitem(last=False)
    assert n_hits / count == pytest.approx(bigger_than_memory.lru_hit_share(cached), abs=0.01)


def test_coverage_is_summed_by_room():
    pytest.importorskip("coverage")
    from tests.hardening import coverage_table

    full = {"num_statements": 10, "covered_lines": 10, "num_branches": 0, "covered_branches": 0}
    half = {"num_statements": 10, "covered_lines": 5, "num_branches": 4, "covered_branches": 3}
    files = {"labkit/core/a.py": full, "labkit/core/b/c.py": half, "labkit/__init__.py": full}
    table = coverage_table.summarize_files(files).set_index("room")
    assert table.loc["labkit/core"].tolist() == [2, 20, 75.0, 4, 75.0]
    assert table.loc["labkit", "lines_pct"] == 100
    assert table.loc["all", "modules"] == 3


def test_mutants_are_counted_by_status():
    pytest.importorskip("mutmut")
    from tests.hardening import mutation

    count = Counter({"killed": 3, "timeout": 1, "survived": 2, "no tests": 5, "not checked": 6})
    row = {"module": "labkit/a.py", "mutants": 6, "killed": 4, "survived": 2, "no_tests": 5, "not_tried": 6}
    assert mutation.count_statuses("labkit/a.py", count) == row


def test_settings_name_files_that_exist():
    mutmut = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["mutmut"]
    names = [*mutmut["only_mutate"], *mutmut["do_not_mutate"], *mutmut["pytest_add_cli_args_test_selection"]]
    names += pd.read_csv(REPO / "tests" / "hardening" / "coverage_reasons.csv")["module"].tolist()
    assert [name for name in names if name.endswith(".py") and not list(REPO.glob(name))] == []
