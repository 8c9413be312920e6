"""The words every room shares. A leaf: it imports no other room, and never torch."""
