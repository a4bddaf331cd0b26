"""From documents to the rows of a run: mixture, packing, chunks, held-out sets and the loader."""
