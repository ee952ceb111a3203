"""`python -m labkit`."""

from labkit.app.cli import main

if __name__ == "__main__":
    main()
