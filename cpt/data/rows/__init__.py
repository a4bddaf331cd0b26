"""Rows of a source: selected documents, packed, window by window."""
