"""How bytes of a piece move: one module a way, one contract for all."""
