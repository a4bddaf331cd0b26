"""The built-in filters, a file for each paper or idea."""
