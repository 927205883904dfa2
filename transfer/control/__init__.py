"""Handoffs, control messages, and how they are sealed."""
