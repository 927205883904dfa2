"""How many replicas each pool has: what is observed, what it needs, and the plan with its reasons. Pure."""
