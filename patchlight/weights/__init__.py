"""Checkpoints in other people's naming, turned into ours."""
