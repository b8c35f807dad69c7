"""What the reader of the API pages does not know of docstrings: ``Example:``, and references such as ``:func:`trace```."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Sections(griffe.Extension):
    """Rename the section, so that examples are shown as code rather than read as prose; references become code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe once for each object."""
        if obj.docstring is not None:
            text = re.sub(
                r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE
            )
            obj.docstring.value = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
