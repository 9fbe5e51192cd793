"""A language model behind a server as judge of captions."""
