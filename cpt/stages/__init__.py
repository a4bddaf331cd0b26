"""One small module per training method; trainer.py holds what all of them share."""
