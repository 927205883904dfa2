"""Handoffs, control messages and their seal."""
