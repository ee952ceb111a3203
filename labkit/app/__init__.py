"""The command line, the tour of the notebooks and its pages."""
