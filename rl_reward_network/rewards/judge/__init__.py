"""Scores of captions by a language model on an OpenAI-compatible server (the LLM judge)."""
