"""Tokenise sources once and store the tokens on disk and in a bucket."""
