"""Verifying a checkpoint beside reading it."""
