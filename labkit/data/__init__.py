"""Bytes and pixels: what lies on disk, and how it becomes a tensor."""
