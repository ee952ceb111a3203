"""`python -m labkit`."""

from labkit.lab import main

if __name__ == "__main__":
    main()
