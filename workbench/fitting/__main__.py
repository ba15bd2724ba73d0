"""`python -m workbench.fitting`: chooses a micro-batch for the ranks of a run; see `choosing.main`."""

from workbench.fitting.choosing import main

if __name__ == "__main__":
    main()
