"""The latent-space router: which expert worker gets which latent, and how it travels."""
