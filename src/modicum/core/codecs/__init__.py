"""Tensors in fewer bytes: on a wire, in memory."""
