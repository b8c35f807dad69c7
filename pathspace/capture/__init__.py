"""From a module and its inputs to a graph of operations that says where each one comes from."""
