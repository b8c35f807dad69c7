"""Measurements of a training run at regular steps, with a record and alarms."""
