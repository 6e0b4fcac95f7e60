"""Identifiers. Never a bare `str` or `int` in a signature."""

from __future__ import annotations

from typing import NewType

WorkerId = NewType("WorkerId", str)
"""Speaking name of a worker, e.g. `expert-1`; unique in a cluster, pools never reuse one."""

RequestId = NewType("RequestId", str)
"""Made by the gateway: `<gateway>-<counter>`, unique in a cluster."""

GatewayId = NewType("GatewayId", str)
"""Name of one gateway replica."""

ClusterId = NewType("ClusterId", str)
"""Random name of one launch; owns its Ray session, sockets and memory files."""

Generation = NewType("Generation", int)
"""Version of the membership: who is connected to whom. Starts at 1, only grows."""

Epoch = NewType("Epoch", int)
"""Version of the placement of one MoE layer. Starts at 1, only grows."""
