# SPDX-License-Identifier: Apache-2.0
"""What tests of several files here share."""

from __future__ import annotations

from fake_driver import fake_driver  # noqa: F401
from native_calls import check  # noqa: F401
