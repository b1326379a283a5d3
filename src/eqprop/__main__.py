"""`python -m eqprop` is the command line."""

from eqprop.cli import main

if __name__ == "__main__":
    main()
