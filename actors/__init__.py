"""Attention workers and expert workers: plain classes, with thin Ray shells beside them."""
