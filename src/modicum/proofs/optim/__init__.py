"""Proofs of the optimizers and of what stands before them."""
