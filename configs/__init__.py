"""Configuration, identifiers and errors: the bottom floor. Imports nothing of ours."""
