"""The reader's own training: what it waits for, and which settings cure it."""
