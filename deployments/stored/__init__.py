"""The store of responses that all ingresses share."""
