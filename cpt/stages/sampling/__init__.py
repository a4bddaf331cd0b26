"""What stages that train on their own samples share."""
