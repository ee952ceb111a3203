"""For the tests and the notebooks alike: a run that leaves something outside its own folders fails."""

pytest_plugins = ["tests.outside"]
