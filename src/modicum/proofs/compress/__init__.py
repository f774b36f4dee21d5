"""Proofs of the compressors."""
