"""The README as package indexes show it: links into the repository become absolute.

Hatchling calls this while it builds. The repository's address is ``Repository`` under ``[project.urls]`` in
``pyproject.toml``, and nowhere else; as long as there is none, links stay as they are.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)")


def absolute(text: str, repository: str) -> str:
    """Return Markdown with every link to a file as a link to the repository: pictures as files, all else as pages."""
    base = repository.rstrip("/")
    return LINK.sub(
        lambda link: f"{link[1]}{link[2]}({base}/{'raw' if link[1] else 'blob'}/HEAD/{link[3]})",
        text,
    )


class Readme(MetadataHookInterface):
    """Sets ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by Hatchling with the table ``[project]``."""
        text, repository = (
            Path(self.root, "README.md").read_text("utf-8"),
            metadata.get("urls", {}).get("Repository"),
        )
        text = absolute(text, repository) if repository else text
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
