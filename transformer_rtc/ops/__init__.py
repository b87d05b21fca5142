"""Operator families: a folder each."""
