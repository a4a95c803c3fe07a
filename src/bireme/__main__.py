"""``python -m bireme`` is the ``bireme`` command."""

from bireme.cli import main

if __name__ == "__main__":
    main()
