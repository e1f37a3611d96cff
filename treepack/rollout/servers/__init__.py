"""Engines behind HTTP: the APIs of vLLM and SGLang."""
