"""Examples: chats, preferences, and prompts with answers, as documents and as rows with labels."""
