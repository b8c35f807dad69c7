"""What all measurements share: the model and its data, its calls, tables, charts and pages."""
