"""The page of recorded runs says what their records say."""

import pandas as pd

from tests.hardening.report import PAGE, RECORDS, markdown, page


def test_the_page_is_what_the_records_say():
    assert PAGE.read_text() == page(), "run `python -m tests.hardening.report`"


def test_every_record_is_on_the_page():
    sections = PAGE.read_text().count("\n## ")
    assert sections == len({path.name.partition(".")[0] for path in RECORDS.glob("*.csv*")} - {"mutation_survivors"})


def test_no_fault_had_a_result_that_it_must_not_have():
    rows = pd.read_csv(RECORDS / "faults.csv")
    assert len(rows) >= 500
    assert rows["violations"].isna().all()


def test_cells():
    frame = pd.DataFrame({"a|b": ["x|y\nz", "n"], "big": [1234567, 1], "part": [0.12345, None], "is": [True, False]})
    assert markdown(frame).splitlines() == [
        r"| a\|b | big | part | is |",
        "| --- | --- | --- | --- |",
        r"| x\|y z | 1,234,567 | 0.123 | True |",
        "| n | 1 |  | False |",
    ]
