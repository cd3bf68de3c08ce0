"""Floor 1: who am I (SLURM, MPI, torchrun) and how processes are started."""
