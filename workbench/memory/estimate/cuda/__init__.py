"""Makes the CPU's operators take the memory that CUDA's would."""
