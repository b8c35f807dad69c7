"""Which matrices may mix features, and changes of their bases."""
