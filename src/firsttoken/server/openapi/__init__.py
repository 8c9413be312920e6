"""The server's own description: an OpenAPI 3.1 document of every route, made from what the server decodes with."""

from firsttoken.server.openapi.document import OpenApi

__all__ = ["OpenApi"]
