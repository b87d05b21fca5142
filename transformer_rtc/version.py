# SPDX-License-Identifier: Apache-2.0
"""The package's version, which pyproject.toml reads."""

__version__ = "0.2.0"
