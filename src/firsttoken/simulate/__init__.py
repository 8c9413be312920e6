"""The real scheduler and KV cache under a virtual clock: what a policy does to a load on a measured GPU. Torch-free."""
