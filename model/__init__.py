"""Kimi-K3-class models in torch: the attention side, the expert side, and the seam between them."""
