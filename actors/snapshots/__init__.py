"""Copies of requests outside their worker: as bytes, where they lie, how they travel."""
