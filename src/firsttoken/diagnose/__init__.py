"""Where the time of a request went, seen from its caller, and which layer is at fault; torch-free."""
