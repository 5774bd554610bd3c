"""kvstore: the persistent store for the KV-cache blocks of LLM inference."""

__version__ = "0.1.0"
