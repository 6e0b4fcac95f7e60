"""The placement benchmark: policies that place experts, on traces of their load.

The rule is that of the public "MoE dynamic load balancing" competition
(github.com/egretwAlker/hackathon_epfl): a policy sees only the past, pays for its own time and for
every slot that it changes, and is scored against EPLB with a window of 1024 steps.
"""
