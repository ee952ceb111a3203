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
    with pytest.raises(FileNotFoundError, match="runs from a clone"):
        notebooks.find_notebooks(folder=tmp_path)
