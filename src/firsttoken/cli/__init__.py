"""The command line: one file a command, each parsing options and calling the room that does the work."""
