"""Job scripts, submission, status and cancelling on SLURM."""
