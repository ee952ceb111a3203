"""Tars extracted to files, never outside their folder."""
