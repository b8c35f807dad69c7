"""What a trace returns: units, weight blocks, and the spanning trees on them."""
