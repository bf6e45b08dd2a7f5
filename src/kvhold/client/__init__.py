"""The engine's side of the protocol: where managers are found, how one is attached to, the arena's mapping."""
