"""`cpt tokenizer`: train, report on, and extend tokenizers."""
