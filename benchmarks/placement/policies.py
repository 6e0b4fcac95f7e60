"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.placement.case import Case
from benchmarks.placement.eplb import UPPER_QUARTILE, Eplb, Static
from benchmarks.placement.fabric_policy import FabricPolicy
from benchmarks.placement.policy import Policy

REFERENCE = "eplb"
"""Scores are relative to it."""
FACTORIES: dict[str, Callable[[Case], Policy]] = {
    "none": lambda _: Static(),
    "eplb": Eplb,
    "eplb_256": lambda case: Eplb(case, "eplb_256", 256),
    "flash_lb": lambda case: Eplb(case, "flash_lb", 1024, UPPER_QUARTILE),
    "flash_lb_256": lambda case: Eplb(case, "flash_lb_256", 256, UPPER_QUARTILE),
    "oracle": lambda case: Eplb(case, "oracle", 256, sees_next=True),
    "ours": lambda case: FabricPolicy(case, name="ours", num_choosers=0),
    "ours_b1": lambda case: FabricPolicy(case, name="ours_b1", num_choosers=1),
    "ours_b8": lambda case: FabricPolicy(case, name="ours_b8", num_choosers=8),
}
