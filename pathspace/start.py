"""The console command; it imports nothing at its top, so that an interrupt is one line from the first instant on."""

import sys


def main() -> None:
    """Import and run the command line."""
    try:
        from pathspace.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("Error: Interrupted before the end.\n")
        sys.exit(130)
