"""The console command; it imports nothing at its top, so that early interrupts end in one line."""

import sys


def main() -> None:
    """Import and run the command line."""
    try:
        from .main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("Error: Interrupted before the end.\n")
        sys.exit(130)
