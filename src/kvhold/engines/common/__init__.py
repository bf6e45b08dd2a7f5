"""What an engine's two halves do with a manager, whichever engine it is: imports no engine and no torch."""
