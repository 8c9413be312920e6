"""The executor for devices with graphs: static inputs, one launch a step, results through a ring of pinned slots."""
