"""``python -m breakeven``."""

from breakeven.cli import main

if __name__ == "__main__":
    main()
