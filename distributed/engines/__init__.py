"""How a model is spread: the contract Engine, the engine that keeps a full replica per process, and their parts."""
