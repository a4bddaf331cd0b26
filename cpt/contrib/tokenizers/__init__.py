"""Report on a tokenizer, extend one, or train one."""
