"""The commands, by what they work on: graphs, checkpoints, weights fitted to a purpose, channels."""
