"""From documents to the rows of a run: mixture, packing, windows, held-out sets and the loader."""
