"""A residual network as a learnable Markov chain: its nodes, their efficiency and first steps."""
