"""Faults that are put into the core, and whether tests notice."""
