"""Text made from the documents by a local model, with its provenance."""
