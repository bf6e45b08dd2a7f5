"""A store that hosts share, as the core sees it: asked what it has, by name, and left to itself when it is down."""
