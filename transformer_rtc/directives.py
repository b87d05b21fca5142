# SPDX-License-Identifier: Apache-2.0
"""The grammar of the directives by which a text includes files, with comments and continued lines in them."""

from __future__ import annotations

import re

__all__ = ["DEFINITION", "HAS_INCLUDE", "INCLUDE", "INCLUDE_OF_MACRO", "may_include", "value_of"]

_SPLICE = r"\\[ \t]*\r?\n"
_COMMENT = r"/\*(?:[^*]|\*(?!/))*\*/"
_GAP = rf"(?:[ \t\f\v\r]|{_SPLICE}|{_COMMENT})*"
_NAME = r'("[^"\n]+"|<[^>\n]+>)'


def _word(word: str) -> str:
    return rf"(?:{_SPLICE})?".join(word)


# Looks for a newline, where "^" would be tried at every character.
_START = rf"\n{_GAP}(?:#|%:){_GAP}"
_INCLUDES = rf"{_word('include')}(?:{_word('_next')})?"

# Of a text that starts with a newline. The first group is what comes before a name.
INCLUDE = re.compile(rf"({_START}{_INCLUDES}{_GAP}){_NAME}")
HAS_INCLUDE = re.compile(rf"(\b{_word('__has_include')}(?:{_word('_next')})?{_GAP}\({_GAP}){_NAME}")
INCLUDE_OF_MACRO = re.compile(rf"({_START}{_INCLUDES}\b{_GAP})([A-Za-z_]\w*)[^\n]*")
# The macro's name, a parenthesis where it takes arguments, and the rest of its lines.
DEFINITION = re.compile(
    rf"{_START}{_word('define')}\b{_GAP}(\w+)(\(?)((?:{_SPLICE}|{_COMMENT}|[^\n\\/]|\\(?![ \t]*\r?\n)|/(?!\*))*)"
)
_NOTHING = re.compile(rf"{_SPLICE}|//.*|({_COMMENT})", re.DOTALL)
_SPLICED = re.compile(_SPLICE)


def value_of(definition: str) -> str:
    """Return what a macro is replaced by: its definition in one line and without comments."""

    def kept(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else " " if match[1] else ""

    line = _SPLICED.sub("", definition)
    return re.sub(rf'"[^"]*"|{_NOTHING.pattern}', kept, line, flags=re.DOTALL).strip()


def may_include(text: str) -> bool:
    """Whether a text may have such a directive."""
    return "include" in text or ("\\" in text and _SPLICED.search(text) is not None)
