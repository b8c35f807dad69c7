"""An HTML page with all measurements of a model; it is written by
:mod:`~pathspace.diagnostics.report.page`.
"""
