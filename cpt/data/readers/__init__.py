"""One file per format: how its rows become documents, and what can be wrong with them."""
