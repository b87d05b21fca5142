# SPDX-License-Identifier: Apache-2.0
"""``python3 -m transformer_rtc``: the command line."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
