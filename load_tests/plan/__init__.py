"""Which fleet serves a trace within its objectives for the least cost: `baton plan`, by the simulator."""
