"""Proofs of the adapters."""
