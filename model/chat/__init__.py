"""K3's chat format: messages to tokens, and the tokens of an answer to what they mean."""
