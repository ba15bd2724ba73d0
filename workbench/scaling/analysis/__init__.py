"""Curves of throughput and laws of loss: what was measured, and what is predicted from it."""
