"""`cpt pipeline`."""
