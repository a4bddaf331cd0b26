"""Text made from the documents by a local model: rewritten, asked about, translated there and back; with its
provenance."""
