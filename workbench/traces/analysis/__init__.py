"""Reads trace files and answers questions about them; arithmetic only, without torch."""
