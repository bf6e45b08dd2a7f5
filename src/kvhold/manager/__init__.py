"""The manager process: the arena, the sockets, the clock, and the effects that the core asks for."""
