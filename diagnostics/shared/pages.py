"""Pages from templates, with escaped values, an error for missing values,
and an embedded style sheet.
"""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from .wording import number_text


def render(template: str, **values: Any) -> str:
    """Fill a template, in which the filter ``n`` writes numbers.

    Args:
        template: name of the template.
        **values: values of the template.

    Returns:
        The page.
    """
    environment = Environment(
        loader=PackageLoader("pathspace.diagnostics.shared"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["n"] = number_text
    return environment.get_template(template).render(**values)
