"""Serving and chat, on Hugging Face's own server and terminal."""
