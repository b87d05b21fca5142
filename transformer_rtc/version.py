"""The package's version, which pyproject.toml reads."""

__version__ = "0.2.0"
