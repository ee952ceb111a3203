"""One module a library: how it does the work of the comparison."""
