"""python -m selfspec is the command selfspec."""

from selfspec.cli import main

if __name__ == "__main__":
    main()
