"""Tasks, models, the papers' tables and figures, and the demo: what the library is tried on, and does not need."""
