"""`cpt tokenizer`."""
