"""Where the time goes and how the engine is doing: account, step ledger, metrics, progress, logs. Torch-free."""
