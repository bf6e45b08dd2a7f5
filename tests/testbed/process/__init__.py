"""Managers and their clients as processes of their own."""
