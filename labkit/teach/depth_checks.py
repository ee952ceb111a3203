"""The checks of the exercises in notebook 09: Marigold's storage."""
