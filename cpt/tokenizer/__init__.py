"""Tokenizers: load, train and extend them."""
