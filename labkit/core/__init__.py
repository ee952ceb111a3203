"""What every room needs and no reader thinks about: the machine, whole-file writes, locks, packed strings."""
