"""``python -m calm_scale`` is ``calm-scale``."""

import sys

if __name__ == "__main__":
    try:
        from calm_scale.cli import main

        main()
    except KeyboardInterrupt:  # while modules were still being read
        sys.stderr.write("calm-scale: interrupted\n")
        sys.exit(130)
