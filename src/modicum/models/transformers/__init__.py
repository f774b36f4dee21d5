"""Decoders and encoders of transformers: built by their own classes, loaded, traced and saved."""
