# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of two arrays that are broadcast to one shape."""
