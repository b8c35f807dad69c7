"""Who shares a scale with whom: a captured graph, read operation by operation through registered rules."""
