"""Fits curves of throughput and laws of loss to measured runs, and predicts from them."""
