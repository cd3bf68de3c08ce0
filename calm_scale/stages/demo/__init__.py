"""The demo: the whole pipeline on this machine, with the commands a user would type."""

from calm_scale.stages.demo.run import run_demo

__all__ = ["run_demo"]
