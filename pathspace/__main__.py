"""``python -m pathspace``: the command line, for launchers that start modules."""

from .cli.start import main

if __name__ == "__main__":
    main()
