"""Small worlds of the core, and the search through all that can happen in them."""
