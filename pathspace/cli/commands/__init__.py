"""The commands, by what they work on: graphs, checkpoints, weights for a purpose, channels."""
