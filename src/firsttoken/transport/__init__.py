"""How the front end and the engine talk: typed messages, one a step, over interchangeable channels."""
