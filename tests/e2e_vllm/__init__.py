"""A real vLLM against a real daemon: ``make e2e-vllm``."""
