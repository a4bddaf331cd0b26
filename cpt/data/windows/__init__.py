"""The rows of a source, window by window, made when they are needed."""
