"""python -m specens <command> <overrides>: the same as `specens <command>`."""

from specens.cli import main

if __name__ == "__main__":
    main()
