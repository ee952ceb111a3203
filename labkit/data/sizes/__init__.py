"""Image sizes without decoding: from caches, metadata and headers."""
