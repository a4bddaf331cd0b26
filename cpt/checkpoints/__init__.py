"""Checkpoints: write, verify, resume from, and remove them."""
