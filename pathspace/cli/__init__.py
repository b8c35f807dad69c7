"""Commands: what a terminal asks for, and the sentences and exit codes that it gets back."""
