"""How much memory an engine will take, from its configuration and its tensors' sizes alone; torch-free."""
