"""The other loaders, each doing the same work, timed in one run."""
