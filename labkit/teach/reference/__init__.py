"""Stored runs of machines with a CUDA GPU, for readers who have none."""
