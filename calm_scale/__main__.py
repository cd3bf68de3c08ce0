"""``python -m calm_scale`` is ``calm-scale``."""

from calm_scale.cli import main

if __name__ == "__main__":
    main()
