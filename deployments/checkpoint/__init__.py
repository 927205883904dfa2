"""Prepares models for engines to load."""
