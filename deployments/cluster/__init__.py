"""In the ingress: the engine-core client that spans the cluster."""
