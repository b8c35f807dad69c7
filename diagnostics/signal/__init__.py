"""How signals and gradients pass through the depth of a network, measured and predicted."""
