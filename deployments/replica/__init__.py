"""An engine and the sessions on it. Plain Python."""
