"""Text that a local model makes from documents, with its provenance."""
