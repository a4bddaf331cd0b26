"""`cpt init`: documents, a model and a GPU become a commented recipe."""
