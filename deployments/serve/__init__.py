"""All that imports ray.serve: replicas, the session manager, their handles and the router, as Serve runs them."""
