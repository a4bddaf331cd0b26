"""The configs that the page imports are those of the tests."""
