"""The commands, by what they work on: graphs, checkpoints, gauges, channels."""
