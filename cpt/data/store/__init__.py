"""Tokenise sources once and store the tokens, on disk and optionally in a bucket."""
