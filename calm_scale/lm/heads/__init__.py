"""Generative heads behind one interface: energy, flow matching, diffusion."""
