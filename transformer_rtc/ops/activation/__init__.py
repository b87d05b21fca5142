# SPDX-License-Identifier: Apache-2.0
"""Activation functions, and their products with a second array."""
