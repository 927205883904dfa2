"""How long steps and answers are predicted to be, and what is cached where. Pure."""
