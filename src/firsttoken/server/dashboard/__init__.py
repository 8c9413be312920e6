"""The live picture of a server: a page, and the feed that it and ``firsttoken top`` read."""

from firsttoken.server.dashboard.routes import Dashboard

__all__ = ["Dashboard"]
