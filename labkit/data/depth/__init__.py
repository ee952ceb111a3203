"""Marigold's pairs of photo and depth."""
