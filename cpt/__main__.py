"""`python -m cpt` is `cpt`."""

from cpt.cli import main

if __name__ == "__main__":
    main()
