"""`python -m labkit`."""

from labkit.lab import app

if __name__ == "__main__":
    app()
