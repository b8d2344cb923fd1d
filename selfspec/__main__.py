"""python -m selfspec is the command selfspec."""

from selfspec.cli.main import main

if __name__ == "__main__":
    main()
