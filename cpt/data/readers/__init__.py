"""Readers, one file per format: how rows become documents, and the errors they can have."""
