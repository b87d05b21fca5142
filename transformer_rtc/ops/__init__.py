# SPDX-License-Identifier: Apache-2.0
"""Operator families: a folder each."""
