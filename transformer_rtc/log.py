# SPDX-License-Identifier: Apache-2.0
"""What is told by `logging`, under the name ``transformer_rtc``.

`logging` is imported for the first record that anybody may read: most processes have none.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

__all__ = ["DEBUG", "INFO", "is_read", "tell"]

# As `logging` has them.
DEBUG, INFO = 10, 20
_NAME = "transformer_rtc"


def is_read(level: int, on_stderr: bool) -> bool:
    """Whether the program asks for records of a level, or ``TRANSFORMER_RTC_LOG`` does, for those on stderr."""
    if on_stderr:
        return True
    if "logging" not in sys.modules:  # nobody has set it up
        return False
    import logging

    return logging.getLogger(_NAME).isEnabledFor(level)


def tell(level: int, message: str, on_stderr: bool) -> None:
    """Log a message.

    Parameters
    ----------
    level : int
        `DEBUG` or `INFO`.
    message : str
        What is told.
    on_stderr : bool
        Whether ``TRANSFORMER_RTC_LOG`` asks for it: it is written to stderr once, whatever the program does with
        records. The program's own loggers and handlers stay as they are.
    """
    import logging

    logger = logging.getLogger(_NAME)
    if on_stderr and not _reaches_stderr(logger, level):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        handler.handle(logger.makeRecord(_NAME, level, __file__, 0, message, (), None))
    logger.log(level, "%s", message)


def _reaches_stderr(logger: logging.Logger, level: int) -> bool:
    """Whether a handler of the program writes such a record to stderr, as one of `logging.basicConfig` does."""
    above: logging.Logger | None = logger if logger.isEnabledFor(level) else None
    while above is not None:
        for handler in above.handlers:
            if getattr(handler, "stream", None) is sys.stderr and handler.level <= level:
                return True
        above = above.parent if above.propagate else None
    return False
