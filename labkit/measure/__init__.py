"""Time any iterable of batches, compare variants, and say what the difference is."""
