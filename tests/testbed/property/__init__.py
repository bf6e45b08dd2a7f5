"""The model that the core is compared with, and the rules of its moves."""
