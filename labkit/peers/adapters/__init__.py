"""One module for each loader that is compared."""
