"""Output Embedding Centering: the helpers of the programs one folder up."""
