"""`cpt data` and `cpt prepare`."""
