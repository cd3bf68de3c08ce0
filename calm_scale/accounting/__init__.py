"""Floor 1: FLOPs, parameters, memory, communication and the ledger, as arithmetic on configs. No torch."""
