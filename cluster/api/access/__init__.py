"""Who may call, how much, and over what: API keys, limits, TLS."""
