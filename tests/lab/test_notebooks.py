"""Running notebooks in kernels."""

import atexit
import types

import pytest

from labkit.lab import notebooks


def test_a_kernel_that_was_ended_is_not_ended_again_at_exit(tmp_path, monkeypatch):
    """As nbclient leaves it where a Ctrl-C comes while it ends the kernel."""

    class Client:
        km = None

        def create_kernel_manager(self):
            return types.SimpleNamespace()

        def _cleanup_kernel(self):
            raise AssertionError("the kernel is gone")

        async def async_execute(self, env):
            raise KeyboardInterrupt

    client, dropped = Client(), []
    monkeypatch.setattr(atexit, "unregister", dropped.append)
    with pytest.raises(KeyboardInterrupt):
        notebooks._run_kernel(client, tmp_path, {})
    assert dropped == [client._cleanup_kernel]


def test_no_notebooks_at_all(tmp_path):
    with pytest.raises(FileNotFoundError, match="runs from a clone"):
        notebooks.find_notebooks(folder=tmp_path)
