"""Threads that write crops straight into batches."""
