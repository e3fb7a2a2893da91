"""``python -m kestrel`` is ``kestrel``."""

from kestrel.cli import main

if __name__ == "__main__":
    main()
