"""`python -m patchlight`."""

from patchlight.cli import main

if __name__ == "__main__":
    main()
