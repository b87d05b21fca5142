"""Activation functions, and their products with a second array."""
