"""JupyterLab for one reader: run as a file by `python -m labkit lab`, so that the server does not load torch."""

import sys

from jupyter_client.ioloop.manager import AsyncIOLoopKernelManager

from labkit.app.recording import EXTENSION_ARGUMENTS


class RecordingKernelManager(AsyncIOLoopKernelManager):
    """Starts Python kernels with the extension that records their runs."""

    def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
        command = super().format_kernel_cmd(extra_arguments)
        return [*command, *EXTENSION_ARGUMENTS] if "ipykernel_launcher" in command else command


def main(arguments: list[str]) -> None:
    """Start JupyterLab; refuse if a configuration has turned off both token and password."""
    from jupyterlab.labapp import LabApp

    kernel_manager = f"--MultiKernelManager.kernel_manager_class={__name__}.{RecordingKernelManager.__name__}"
    server = LabApp.initialize_server(argv=[*arguments, kernel_manager])
    if not server.identity_provider.auth_enabled:
        sys.exit(
            "labkit: a Jupyter configuration turns the token off, and whoever reaches the port could run code as you: "
            "take `token = ''` out of it (`jupyter --paths` lists where it may be), or start `jupyter lab` yourself"
        )
    server.start()


if __name__ == "__main__":
    main(sys.argv[1:])
