"""Bytes at an offset: of a local file, over HTTP, or from object storage."""
