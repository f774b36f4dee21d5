"""What rooms need to know of a model's layers: forms, names, sizes, statistics."""
