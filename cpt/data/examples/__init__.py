"""Examples: chats, preferences and pairs of prompt and answer, as documents and as rows with labels."""
