"""Running notebooks in kernels."""

import atexit
from unittest.mock import AsyncMock, Mock

import pytest

from labkit.lab import notebooks


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


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"cells": []}'])
def test_a_file_that_is_no_notebook_is_named(tmp_path, text):
    (tmp_path / "00_odd.ipynb").write_text(text)
    with pytest.raises(ValueError, match=r"00_odd.ipynb is not a notebook \(.*repair or remove it"):
        notebooks.find_notebooks(folder=tmp_path)
