"""The package's version, which pyproject.toml reads."""

__version__ = "0.1.0"
