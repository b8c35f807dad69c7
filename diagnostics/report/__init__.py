"""One page about a model: :func:`report` measures, :class:`Report` holds numbers, sentences and HTML."""

from pathspace.diagnostics.report.page import Report, report

__all__ = ["Report", "report"]
