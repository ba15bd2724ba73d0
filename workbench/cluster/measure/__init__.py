"""Timing of collectives between real ranks."""
