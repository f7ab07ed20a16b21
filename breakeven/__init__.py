"""The command line: ``breakeven serve | verifier | drafter``. Above all other packages; imports them lazily."""

__all__ = ["__version__"]

__version__ = "0.1.0"
