"""How tokens travel to the ranks of their experts and back. The contract is in `contract.py`, one transport a file."""
