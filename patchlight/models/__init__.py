"""Architectures, one readable file each, and the pieces they share."""
