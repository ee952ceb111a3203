"""JupyterLab for one reader: run as a file by `python -m labkit lab`, so that the server does not load torch."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from jupyter_server.services.kernels.kernelmanager import ServerKernelManager

from labkit.app.recording import EXTENSION_ARGUMENTS


class RecordingKernelManager(ServerKernelManager):
    """Starts Python kernels with the extension that records their runs."""

    def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
        command = super().format_kernel_cmd(extra_arguments)
        return [*command, *EXTENSION_ARGUMENTS] if "ipykernel_launcher" in command else command


def keep_kernel_metadata(model: dict[str, Any], path: str, contents_manager: Any, **_: Any) -> None:
    """Before a notebook is saved: what it says about its kernel stays as the file has it, where that is the same one.

    JupyterLab writes down the version of Python whenever it opens a notebook: with another version than the one that
    stored it, the file would change although nobody has changed anything.
    """
    if model["type"] != "notebook":
        return
    with suppress(OSError, ValueError, KeyError, TypeError):  # a new file, or none of a notebook
        stored = json.loads(Path(contents_manager.root_dir, path.lstrip("/")).read_bytes())["metadata"]
        metadata = model["content"]["metadata"]
        if metadata["kernelspec"]["name"] == stored["kernelspec"]["name"]:
            metadata.update({name: stored[name] for name in ("kernelspec", "language_info")})


def main(arguments: list[str]) -> None:
    """Start JupyterLab; refuse if a configuration has turned off both token and password."""
    from jupyterlab.labapp import LabApp

    own = [
        f"--MultiKernelManager.kernel_manager_class={__name__}.{RecordingKernelManager.__name__}",
        f"--FileContentsManager.pre_save_hook={__name__}.{keep_kernel_metadata.__name__}",
    ]
    server = LabApp.initialize_server(argv=[*arguments, *own])
    if not server.identity_provider.auth_enabled:
        sys.exit(
            "labkit: a Jupyter configuration turns the token off, and whoever reaches the port could run code as you: "
            "take `token = ''` out of it (`jupyter --paths` lists where it may be), or start `jupyter lab` yourself"
        )
    server.start()


if __name__ == "__main__":
    main(sys.argv[1:])
