"""Nouns of memory and their arithmetic, without torch."""
