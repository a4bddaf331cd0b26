"""The reference pages of docs/, written from the schema, the built-ins' signatures and the commands' own help."""
