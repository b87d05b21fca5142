# SPDX-License-Identifier: Apache-2.0
"""Runs a kernel's text on the CPU, with CUDA's semantics; in checked mode every access is checked."""

from .device import SimulatedDevice

__all__ = ["SimulatedDevice"]
