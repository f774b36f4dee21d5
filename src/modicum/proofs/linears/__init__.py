"""Proofs of the linear forms."""
