"""Arithmetic of two arrays that are broadcast to one shape."""
