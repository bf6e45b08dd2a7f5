"""The engine's side of the control protocol: where managers are found, how one is attached to, and the arena's mapping."""
