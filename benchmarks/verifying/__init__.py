"""Verifying a checkpoint compared with reading it."""
