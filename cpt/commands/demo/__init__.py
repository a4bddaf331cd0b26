"""`cpt demo`."""
