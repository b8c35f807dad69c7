"""What parameters cost, which of them matter, and what gradients do to them."""
