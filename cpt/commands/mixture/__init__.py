"""`cpt mixture`."""
