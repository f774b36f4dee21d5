"""Proofs of policies on activations."""
