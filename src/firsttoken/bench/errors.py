"""What a measurement raises when its figures would not mean what they say."""

from firsttoken.core.errors import FirstTokenError


class BenchFailed(FirstTokenError):
    """The engine did not do the work that was to be measured; the command line exits with 1."""
