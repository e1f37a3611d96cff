"""Rollout files of the Codex CLI."""
