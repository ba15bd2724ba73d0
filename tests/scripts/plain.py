"""A rank without torch says who it is."""

import os
import sys

if __name__ == "__main__":
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {' '.join(sys.argv[1:])}")
