"""Panels of data: what an audit has found."""
