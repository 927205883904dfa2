"""API keys: what is known of them, where they come from, and what each opens."""
