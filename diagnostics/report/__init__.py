"""One page about a model: :mod:`~pathspace.diagnostics.report.page` measures it and writes the HTML."""
