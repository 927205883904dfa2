"""Requests that are valid but hostile, made by a seed, and the judgement of their answers."""
