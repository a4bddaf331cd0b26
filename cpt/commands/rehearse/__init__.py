"""`cpt rehearse`."""
