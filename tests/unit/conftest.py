"""What tests of several files here share."""

from __future__ import annotations

from native_calls import check  # noqa: F401
