"""Running notebooks in kernels."""

import atexit
import json
from unittest.mock import AsyncMock, Mock

import pytest

from labkit.app import notebooks


def test_a_kernel_that_was_ended_is_not_ended_again_at_exit(tmp_path, monkeypatch):
    """As nbclient leaves it where a Ctrl-C comes while it ends the kernel."""

    client, dropped = Mock(km=None, async_execute=AsyncMock(side_effect=KeyboardInterrupt)), []
    monkeypatch.setattr(atexit, "unregister", dropped.append)
    with pytest.raises(KeyboardInterrupt):
        notebooks._run_kernel(client, tmp_path, {})
    assert dropped == [client._cleanup_kernel]


def test_no_notebooks_at_all(tmp_path):
    with pytest.raises(FileNotFoundError, match="install labkit again"):
        notebooks.find_notebooks(folder=tmp_path)


def test_a_letter_after_the_number_puts_a_lesson_between_two(tmp_path):
    cell = {"source": ["# 11\n", "**Question.** Why?\n", "**Minutes.** 5"]}
    for name in ("12_last", "11b_middle", "11_first", "draft", "11bc_draft"):
        (tmp_path / f"{name}.ipynb").write_text(json.dumps({"cells": [cell]}))
    found = {only: [each.name for each in notebooks.find_notebooks(only, tmp_path)] for only in ("", "11", "11b")}
    assert found[""] == ["11_first", "11b_middle", "12_last"]
    assert (found["11"], found["11b"]) == (["11_first", "11b_middle"], ["11b_middle"])


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"cells": []}'])
def test_a_file_that_is_no_notebook_is_named(tmp_path, text):
    (tmp_path / "00_odd.ipynb").write_text(text)
    with pytest.raises(ValueError, match=r"00_odd.ipynb is not a notebook \(.*repair or remove it"):
        notebooks.find_notebooks(folder=tmp_path)
