"""``python -m nnx`` is the same as the command ``nnx``."""

from nnx.cli import main

if __name__ == "__main__":
    main()
