"""Several recipes in a row, each a run of its own that later ones go on from."""
