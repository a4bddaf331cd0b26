"""Tokenizers: loaded with a model, or trained."""
