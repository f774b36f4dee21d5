"""The batteries: what must hold of every method of a room, whoever wrote it."""
