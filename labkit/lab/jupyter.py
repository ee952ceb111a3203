"""JupyterLab for one reader: run as a file by `python -m labkit lab`, so that the server need not load torch."""

import sys


def main(arguments: list[str]) -> None:
    """Start it; without a token or a password, which a configuration may have turned off, refuse."""
    from jupyterlab.labapp import LabApp

    server = LabApp.initialize_server(argv=arguments)
    if not server.identity_provider.auth_enabled:
        sys.exit(
            "labkit: a Jupyter configuration turns the token off, and whoever reaches the port could run code as you: "
            "take `token = ''` out of it (`jupyter --paths` lists where it may be), or start `jupyter lab` yourself"
        )
    server.start()


if __name__ == "__main__":
    main(sys.argv[1:])
