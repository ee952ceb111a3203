"""The checks of the exercises in notebook 08: shard formats."""
