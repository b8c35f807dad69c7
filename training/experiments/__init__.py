"""Tasks, models, the papers' tables and figures, and the demo; the library
itself does not use them.
"""
