"""The console command. It imports nothing at its top, so that an early interrupt also
gives a one-line message.
"""

import sys


def main() -> None:
    """Import and run the command line."""
    try:
        from .main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("Error: Interrupted before the end.\n")
        sys.exit(130)
