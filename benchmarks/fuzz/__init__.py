"""Fuzzing: `benchmarks.fuzz.targets` are functions of bytes that raise at a fault, ``python -m benchmarks.fuzz`` runs
them under atheris, and ``tests/fuzz`` replays what it found."""
