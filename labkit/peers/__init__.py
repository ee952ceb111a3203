"""Other loaders, checked and timed on the same work."""
