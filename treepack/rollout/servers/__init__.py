"""Engines at an HTTP address: the APIs of vLLM and SGLang."""
