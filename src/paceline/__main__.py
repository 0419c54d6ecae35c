"""`python -m paceline` is the `paceline` command."""

from paceline.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
