"""Tasks, models, the papers' tables and figures, and the demo."""
