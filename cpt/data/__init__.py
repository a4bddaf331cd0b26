"""Convert documents to the rows that the model reads."""
