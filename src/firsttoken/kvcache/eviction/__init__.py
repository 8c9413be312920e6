"""Which cached shard goes next: one small interface, and the policies behind it."""
